"""What several ranks saved, each its part, for weightloaders: DCP folders, and vLLM's sharded states."""

from weightloaders_dcp.loader import DcpLoader as DcpLoader
from weightloaders_dcp.sharded_state import ShardedStateLoader as ShardedStateLoader
