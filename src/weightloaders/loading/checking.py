"""What a load checks because it was asked to: files before it, values after it, and where each of them came from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from weightloaders.plan import Finding, listed, step_infos, step_targets
from weightloaders.provenance import Part, Provenance
from weightloaders.transfer.inspecting import Inspection

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from weightloaders.loading.context import LoadContext
    from weightloaders.plan import LoadPlan
    from weightloaders.targets import Target
    from weightloaders.weights.info import TensorInfo


def check_files(plan: LoadPlan, context: LoadContext) -> None:
    """Hold the files that a plan reads against their checksums, where that was asked for.

    Raises:
        WeightLoadersError: As `Verification.check_files` does. Nothing was touched.
    """
    if not context.verify.sha256:
        return
    with context.timed("verify"):
        check = context.verify.check_files(plan.tensors_read, plan.described_by)
    context.compared.update({file.name: f"{due.algorithm}:{due.digest}" for file, due in check.due.items()})
    told = [str(check)]
    if check.unknown:
        told.append(f"no checksum is known of {listed([file.name for file in check.unknown])}, so none was compared")
    plan.findings.extend(finding for text in told if (finding := Finding("note", "info", text)) not in plan.findings)


def inspection_for(context: LoadContext) -> Inspection:
    """What looks at values once they are loaded, as was asked for."""
    return Inspection(finite=context.verify.finite, checksum=context.verify.record)


def parts_of(plan: LoadPlan) -> dict[str, Provenance]:
    """Parameter -> the tensors that the steps make it of; what it came to is not known yet."""
    found: dict[str, Provenance] = {}
    for step in plan.steps:
        parts = tuple(_part(info) for info in step_infos(step))
        for target in step_targets(step):
            before = found[target.name].parts if target.name in found else ()
            dtype, shape = str(target.dtype).removeprefix("torch."), target.shape
            found[target.name] = Provenance(dtype, shape, "", (*before, *parts), tuple(step.rules))
    return found


def _part(info: TensorInfo) -> Part:
    origins = info.origins
    extents = tuple((extent.offset, extent.length) for extent in info.extents)
    return Part(info.name, origins[0].name if origins else None, extents)


def recorded(
    inspection: Inspection, parts: Mapping[str, Provenance], targets: Iterable[Target]
) -> dict[str, Provenance]:
    """Where each parameter came from and what it came to, as far as that was asked for."""
    result = {}
    for target in targets:
        sha256 = inspection.found[target.name].sha256 if target.name in inspection.found else None
        if sha256 is not None:
            dtype = str(target.tensor.dtype).removeprefix("torch.")
            made = parts.get(target.name, Provenance(dtype, tuple(target.tensor.shape), ""))
            result[target.name] = replace(made, dtype=dtype, sha256=sha256)
    return result
