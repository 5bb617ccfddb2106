"""attend_pool(): one new token of every row attends to a pool, whatever its model wants besides."""

from torch import Tensor

from penstock.engine.attention_call import AttentionCall, AttentionSum
from penstock.kernels.decode_attention import coded_blocks
from penstock.kernels.device.attention import pool_attention
from penstock.kernels.plain_attention import add_attention_sink


def attend_pool(
    call: AttentionCall, tokens: Tensor, mask: Tensor, lse: Tensor | None = None,
    codes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend in one kernel, or with a soft cap on the logits by torch; sinks that have a logit and
    no key are added behind.

    Args:
        call: of one new token, which is in the pool already.
        tokens: contiguous. [rows, places, 2, kv_heads, head_dim]
        mask: additive, 0 or minus infinity. [rows, coded_places + places]
        lse: receives the log-sum-exp of the logits. float32 [rows, heads of a row]
        codes: places in 8 bits before `tokens`. uint8 [rows, coded_places, coded_token_bytes]

    Returns:
        [rows, 1, heads of a row, head_dim]
    """
    if call.softcap is not None:
        total = AttentionSum(call)
        if codes is not None:
            size = (tokens.shape[3], tokens.shape[4])
            for block in coded_blocks(codes, mask, size, tokens.dtype):
                total.add(*block)
            mask = mask[:, codes.shape[1] :]
        total.add(tokens[:, :, 0].transpose(1, 2), tokens[:, :, 1].transpose(1, 2), mask)
        if lse is not None:
            lse.copy_(total.lse[:, :, 0])
        return total.result()
    query = call.query[:, :, 0]
    out, sums = pool_attention(query, tokens, mask, call.scaling, codes=codes, with_lse=True)
    if lse is not None:
        lse.copy_(sums)
    if call.sink_logits is None:
        return out.unsqueeze(1)
    out, _ = add_attention_sink(out.unsqueeze(2).float(), sums.unsqueeze(2), call.sink_logits)
    return out.to(call.query.dtype).transpose(1, 2)
