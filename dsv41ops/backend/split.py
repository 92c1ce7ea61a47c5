"""Decodes and prompts of one batch, counted on the host."""

from __future__ import annotations

from typing import NamedTuple

from dsv41ops.backend.metadata import CommonAttentionMetadata


class DecodeSplit(NamedTuple):
    """Counts of the leading decodes and of everything behind them."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1
) -> DecodeSplit:
    """Count the leading run of requests with at most ``decode_threshold`` query tokens.

    An engine puts its decodes first. A short query behind the first long one is counted with the
    prompts, so both sides stay contiguous; no result depends on it, because the ops treat rows of
    either kind alike. Empty (padded) requests count on the side where they stand.

    Reads ``query_start_loc_cpu`` and nothing on the device. Without that copy only a batch whose
    ``max_query_len`` fits the threshold can be told apart.
    """
    common = common_attn_metadata
    starts_cpu = common.query_start_loc_cpu
    if starts_cpu is None:
        if common.max_query_len > decode_threshold:
            raise ValueError(
                "query_start_loc_cpu: expected a CPU tensor, since max_query_len = "
                f"{common.max_query_len} is above the decode threshold of {decode_threshold}, "
                "got None"
            )
        return DecodeSplit(common.num_reqs, 0, common.num_actual_tokens, 0)
    if starts_cpu.device.type != "cpu":
        raise ValueError(
            f"query_start_loc_cpu: expected a CPU tensor, got one on {starts_cpu.device}"
        )
    starts: list[int] = starts_cpu.tolist()
    if len(starts) <= common.num_reqs:
        raise ValueError(
            f"query_start_loc_cpu: expected at least num_reqs + 1 = {common.num_reqs + 1} "
            f"entries, got {len(starts)}"
        )
    num_decodes = 0
    while (
        num_decodes < common.num_reqs
        and starts[num_decodes + 1] - starts[num_decodes] <= decode_threshold
    ):
        num_decodes += 1
    return DecodeSplit(
        num_decodes=num_decodes,
        num_prefills=common.num_reqs - num_decodes,
        num_decode_tokens=starts[num_decodes],
        num_prefill_tokens=starts[common.num_reqs] - starts[num_decodes],
    )
