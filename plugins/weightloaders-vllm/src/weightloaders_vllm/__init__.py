"""Every loader of weightloaders as a load format of vLLM.

::

    vllm.LLM(model="folder", load_format="weightloaders", model_loader_extra_config={"loader": "binary"})
    vllm.LLM(model="folder", load_format="weightloaders:binary")
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

__all__ = ["register"]

FORMAT = "weightloaders"


def register() -> None:
    """Make the load formats known to vLLM, which calls this in each of its processes, perhaps several times.

    An exception would end every start of vLLM, also of who loads otherwise; so there is none, and the load format is
    unknown then.
    """
    try:
        from weightloaders_vllm.registering import register_formats

        register_formats()
    except Exception:
        logger.exception("load_format=%r can't be offered", FORMAT)
