"""Seeds of a call: every way to choose a token takes one."""

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.generation.seeded import Seeded
from penstock.testing.tiny_models import tiny_model

PROMPTS = [list(range(5, 45)), list(range(9, 30))]


@pytest.mark.parametrize(
    "chosen",
    [{"temperature": 0}, {"top_k": 1}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.6}, {}],
)
def test_a_seed_goes_with_every_other_setting(chosen: dict[str, float]) -> None:
    llm = LLM(tiny_model("llama"), store="memory", memory="auto")
    params = SamplingParams(max_tokens=6, seed=3, **chosen)  # type: ignore[arg-type]
    first, second = (llm.generate(PROMPTS, params) for _ in range(2))
    assert [each.token_ids for each in first] == [each.token_ids for each in second]
    if chosen == {"temperature": 0}:
        unseeded = llm.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0))
        assert [each.token_ids for each in unseeded] == [each.token_ids for each in first]


def test_scores_keep_their_generator_through_lists_and_leave_tokens_plain() -> None:
    scores = torch.randn(2, 9)
    marked = Seeded(4, scores.device)(torch.zeros(2, 1), scores)
    joined = torch.cat([marked, marked], dim=1)
    assert type(joined) is type(marked)
    for plain in (marked.argmax(dim=-1), marked.topk(3)[1], marked.sort()[1]):
        assert type(plain) is torch.Tensor
    drawn = torch.multinomial(joined.softmax(dim=-1), 5)
    again = Seeded(4, scores.device)(torch.zeros(2, 1), scores)
    assert torch.equal(
        drawn, torch.multinomial(torch.cat([again, again], dim=1).softmax(dim=-1), 5)
    )
