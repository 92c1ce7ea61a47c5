"""Decode context parallelism (DCP): which compressed states this rank owns."""

from __future__ import annotations

from dataclasses import dataclass

from dsv41ops.backend.arguments import require_int


@dataclass(frozen=True)
class DCPGeometry:
    """Compressed states dealt to ``dcp_world_size`` ranks in runs of ``cp_interleave`` states.

    State ``s`` belongs to rank ``s // cp_interleave % dcp_world_size``. The fields carry the names
    of the ops' arguments. With one rank the interleave changes nothing.
    """

    dcp_world_size: int = 1
    dcp_rank: int = 0
    cp_interleave: int = 1

    def __post_init__(self) -> None:
        world = require_int("dcp_world_size", self.dcp_world_size, 1)
        rank = require_int("dcp_rank", self.dcp_rank)
        if not 0 <= rank < world:
            raise ValueError(f"dcp_rank: expected 0 <= rank < dcp_world_size = {world}, got {rank}")
        require_int("cp_interleave", self.cp_interleave, 1)

    @classmethod
    def from_token_interleave(
        cls,
        dcp_world_size: int,
        dcp_rank: int,
        cp_kv_cache_interleave_size: int,
        compress_ratio: int,
    ) -> DCPGeometry:
        """The geometry of an engine that counts the interleave in tokens, as vLLM does.

        A run of tokens has to be a whole number of states. With one rank there are no runs, so any
        interleave is taken (an engine's default is 1 token, at every ratio).
        """
        tokens = require_int("cp_kv_cache_interleave_size", cp_kv_cache_interleave_size, 1)
        require_int("compress_ratio", compress_ratio, 1)
        if dcp_world_size == 1:
            return cls(dcp_world_size, dcp_rank)
        if tokens % compress_ratio != 0:
            raise ValueError(
                "cp_kv_cache_interleave_size: expected a multiple of "
                f"compress_ratio = {compress_ratio} under DCP, got {tokens}"
            )
        return cls(dcp_world_size, dcp_rank, tokens // compress_ratio)

    @property
    def enabled(self) -> bool:
        return self.dcp_world_size > 1

    def check_page(self, states_per_page: int) -> None:
        """Under DCP a page must hold whole runs, not part of a run that is not allocated yet."""
        if self.enabled and states_per_page % self.cp_interleave != 0:
            raise ValueError(
                f"states_per_page: expected a multiple of cp_interleave = {self.cp_interleave} "
                f"under DCP, got {states_per_page}"
            )


SINGLE_RANK = DCPGeometry()
