"""Explain: a tuning's picks in sentences, with the figures that decided."""

from collections.abc import Sequence

from penstock.core.byte_size import format_bytes
from penstock.methods.kvswap.policy import KVSwap
from penstock.tuner.block_profile import BlockProfile
from penstock.tuner.candidates import Candidate
from penstock.tuner.kvswap_search import Found
from penstock.tuner.solver import Expected, expect


def reason(found: Found, profile: BlockProfile, floor: float) -> str:
    """Why KVSwap's solution of one (b, S) is what it is: one sentence."""
    best, device = found.best, profile.device
    group = best.candidate.plan.group_tokens
    parts = [
        f"{device.title}: G={group}, as {_hides(best)}",
        *_other_group(found, profile, group // 2, floor),
        *_other_group(found, profile, group * 2, floor),
    ]
    quality = best.candidate.kl
    if quality is not None:
        parts.append(f"KL {quality:.3f} of {floor:g} nats allowed")
    return "; ".join(parts) + "."


def _hides(each: Expected) -> str:
    io, work = f"{1e3 * each.io_s:.2f} ms", f"{1e3 * each.layer_s:.2f} ms"
    if each.hides:
        return f"a layer's reads ({io}) run behind its work ({work})"
    return f"a layer's reads ({io}) take longer than its work ({work})"


def _other_group(found: Found, profile: BlockProfile, group: int, floor: float) -> list[str]:
    """What a neighbouring G would have done, all else as near as it comes."""
    chosen = found.best.candidate
    same = [each for each in found.spot.found if each.plan.group_tokens == group]
    if not same:
        return []
    nearest = min(same, key=lambda each: _distance(each, chosen))
    if nearest.kl is not None and nearest.kl > floor:
        return [f"G={group} would be too far from full attention (KL {nearest.kl:.3f})"]
    other = expect(profile, nearest)
    ratio = other.step_s / found.best.step_s - 1
    if abs(ratio) < 0.005:
        return [f"G={group} would be as fast"]
    word = "slower" if ratio > 0 else "faster"
    reads = f"G={group} would read {1e3 * other.io_s:.2f} ms a layer"
    return [f"{reads} and be {100 * abs(ratio):.0f} % {word}"]


def _distance(each: Candidate, chosen: Candidate) -> tuple[bool, float, float]:
    a, b = each.policy, chosen.policy
    return (
        (a.rank, a.index_bits) != (b.rank, b.index_bits),
        abs(each.selected_tokens - chosen.selected_tokens),
        abs(each.capacity_tokens - chosen.capacity_tokens),
    )


def setting_words(policy: KVSwap, joint_dim: int) -> str:
    """G, MG, C and sigma, as the paper calls them."""
    sigma = joint_dim / (policy.rank or joint_dim)
    reuse = policy.reuse_tokens or 0
    return (
        f"G={policy.group_tokens}, MG={policy.selected_tokens}, "
        f"C={reuse if reuse else 'none'}, rank {policy.rank} at {policy.index_bits} bits "
        f"(sigma {sigma:.0f})"
    )


def paragraph(
    found: Sequence[Found], profile: BlockProfile, *, joint_dim: int, floor: float,
) -> str:  # fmt: skip
    """KVSwap's solution at the largest (b, S), why, and what the paper's search would take."""
    last = found[-1]
    best = last.best
    paper = ""
    if last.paper is not None and last.paper.candidate.policy != best.candidate.policy:
        words = setting_words(last.paper.candidate.policy, joint_dim)
        paper = (
            f" The paper's own search (smallest sigma, then the smallest G that hides) would take "
            f"{words}: {last.paper.tokens_per_s:.3g} tokens/s predicted."
        )
    return (
        f"At {last.spot.batch} x {last.spot.context:,} tokens kvswap runs with "
        f"{setting_words(best.candidate.policy, joint_dim)}, "
        f"{format_bytes(best.candidate.resident_bytes)} of "
        f"{format_bytes(last.spot.limit_bytes)}, {best.tokens_per_s:.3g} tokens/s predicted"
        f"{_measured(last)}. {reason(last, profile, floor)}{paper}"
    )


def _measured(found: Found) -> str:
    if found.measured is None:
        return ""
    return f", {found.spot.batch / found.measured.step_s:.3g} measured"
