"""Sampling: greedy, top-k, top-p, and draws that depend on nothing but their own query."""

import pytest
import torch
from toy_runs import Lockstep

from xrunner.models.weights import Shard
from xrunner.ops.output_head import WholeScores
from xrunner.ops.sampling import NOT_FINITE, sample, sample_shards, uniform, unless_finite
from xrunner.query import Sampling

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0])


def draw(choice: Sampling, count: int = 4000) -> torch.Tensor:
    rows = LOGITS.expand(count, -1)
    tokens = sample(WholeScores(rows), [choice] * count, list(range(count)))
    return torch.bincount(tokens, minlength=4).double() / count


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-39, 1e-6])
def test_a_vanishing_temperature_is_greedy_and_never_overflows(temperature):
    assert draw(Sampling(temperature=temperature), 3).tolist() == [0, 1, 0, 0]


def test_frequencies_follow_the_softmax():
    for temperature in (0.7, 1.0, 2.0):
        shares = draw(Sampling(temperature=temperature, seed=3))
        # 4000 draws: a share's standard error is below 0.008
        assert torch.allclose(shares, torch.softmax(LOGITS.double() / temperature, 0), atol=0.03)


def test_top_k_and_top_p_keep_the_likeliest_tokens_only():
    assert draw(Sampling(temperature=1, top_k=2)).tolist()[0] == 0
    assert (draw(Sampling(temperature=1, top_k=2)) > 0).tolist() == [False, True, True, False]
    assert (draw(Sampling(temperature=1, top_p=0.5)) > 0).tolist() == [False, True, False, False]
    assert (draw(Sampling(temperature=1, top_p=0.9)) > 0).tolist() == [True, True, True, False]


def test_a_draw_is_the_same_in_any_batch():
    choices = [Sampling(temperature=1.0, seed=s) for s in range(6)]
    rows = torch.randn(6, 50)
    together = sample(WholeScores(rows), choices, [7] * 6)
    alone = [int(sample(WholeScores(rows[i:i + 1]), [choices[i]], [7])) for i in range(6)]
    assert together.tolist() == alone


@pytest.mark.parametrize("own", [{"temperature": 1.0, "top_k": 20},
                                 {"barred": (5,), "barred_until": 9}])
def test_of_equal_logits_a_row_takes_the_same_whatever_is_beside_it(own):
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(3)).mul(2)
    logits = logits.bfloat16().float()  # a few hundred values, each many times
    logits[0, [7, 9, 300, 4000]] = logits[0].max()
    for seed in range(30):
        choices = [Sampling(seed=seed, **own), Sampling(temperature=1.0, seed=seed)]
        alone = sample(WholeScores(logits[:1]), choices[:1], [7])
        assert sample(WholeScores(logits), choices, [7, 8])[0] == alone[0]
        if not choices[0].is_drawn:
            assert alone.tolist() == [int(logits[0].argmax())]


def test_uniform_numbers_fill_the_interval_evenly():
    values = torch.tensor([uniform(s, position) for s in range(50) for position in range(100)])
    assert values.min() >= 0 and values.max() < 1
    counts = torch.histc(values, 10, 0, 1)
    assert ((counts - 500).abs() < 100).all()
    by_seed = values.view(50, 100)
    assert abs(float(torch.corrcoef(by_seed[:2])[0, 1])) < 0.3


@pytest.mark.parametrize("vocab", [97, 3])
@pytest.mark.parametrize("degree", [2, 4])
def test_a_divided_vocabulary_gives_the_tokens_of_a_whole_one(degree, vocab):
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(4)) * 2
    logits[:25] = logits[:25].round()  # equal ones: the lowest token wins
    choices = [Sampling(), Sampling(temperature=0.8, seed=1), Sampling(temperature=1.3, top_k=9),
               Sampling(temperature=1.0, top_k=500, top_p=0.7, seed=3)]
    for kinds in ([choices[0]], choices[:3], [choices[2]], choices):
        chosen = [kinds[row % len(kinds)] if row >= 10 else choices[0] for row in range(40)]
        positions = list(range(40))

        def work(shard: Shard, chosen=chosen, positions=positions) -> torch.Tensor | None:
            part = shard.vocabulary_part(vocab)
            return sample_shards(WholeScores(logits[:, part.start:part.stop]), chosen, positions,
                                 shard, vocab)

        found = Lockstep(degree).run(work)
        assert found[1:] == [None] * (degree - 1)
        assert found[0] is not None
        assert found[0].tolist() == sample(WholeScores(logits), chosen, positions).tolist()


@pytest.mark.parametrize("degree", [1, 2])
def test_logits_that_are_no_numbers_give_no_token(degree):
    """Every token 0, as if it were an answer, is what an argmax makes of them."""
    choices = [Sampling(), Sampling(temperature=0.8, seed=1), Sampling(temperature=1.0, top_k=3)]
    logits = torch.randn(12, 11)
    logits[3:6], logits[6:9, 9] = float("nan"), float("inf")

    def work(shard: Shard) -> torch.Tensor | None:
        part = shard.vocabulary_part(11)
        own = logits if part is None else logits[:, part.start:part.stop]
        return sample_shards(WholeScores(own), choices * 4, list(range(12)), shard, 11)

    tokens = Lockstep(degree).run(work)[0]
    assert tokens[3:9].tolist() == [NOT_FINITE] * 6
    good = [0, 1, 2, 9, 10, 11]
    assert tokens[good].tolist() == sample(WholeScores(logits[good]), choices * 2, good).tolist()


def test_a_row_that_is_not_finite_gives_no_token_whatever_its_logits():
    hidden, tokens = torch.ones(3, 4), torch.tensor([5, 6, 7])
    assert unless_finite(tokens, hidden).tolist() == [5, 6, 7]
    hidden[1, 2], hidden[2, 0] = float("nan"), 3e38
    assert unless_finite(tokens, hidden).tolist() == [5, NOT_FINITE, 7]
    hidden[0, 3] = -float("inf")
    assert unless_finite(tokens, hidden.bfloat16()).tolist() == [NOT_FINITE, NOT_FINITE, 7]
    assert unless_finite(tokens[:0], hidden[:0]).tolist() == []
