"""One step of the model: from a plan's works to logits, and from those to tokens."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.models.base import CausalLM
from forebay.scheduler.plan import Work
from forebay.workers.batching import build_batch
from forebay.workers.choosing import Row, choose_rows
from forebay.workers.generation import Generation
from forebay.workers.holdings import Holdings
from forebay.workers.hot.holdings import HotHoldings
from forebay.workers.outbox import Outbox
from forebay.workers.sampling import NoToken, Sampled, sample, score


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step's rows, and the requests whose part of it is void: `lost` are those that can't go on with what they
    have, the others repeat it."""

    rows: Sequence[Row]
    void: Collection[Hashable] = ()
    lost: Sequence[Hashable] = ()


@dataclass(frozen=True, slots=True)
class Stepper:
    """Runs the model and chooses tokens. Mutates pools, requests and chains; blocks for the time of the step. `hot` are
    the holdings, if some of what they hold may be in host memory."""

    model: CausalLM
    pools: Mapping[str, Tensor]
    holdings: Holdings
    outbox: Outbox
    hot: HotHoldings | None = None

    def forward(self, works: Sequence[Work], generations: Sequence[Generation]) -> Stepped:
        """Compute `works`, which are those of `generations`; a row for each position that is scored or sampled, in
        order."""
        resolver = None if self.hot is None else self.hot.resolver(works, self.pools)
        batch = build_batch(works, self.holdings, self.model.device, resolver)
        with torch.inference_mode():
            logits = self.model.forward(batch, self.pools)
            # On an accelerator this is where the step is waited for; its blocks are complete after it.
            rows = choose_rows(logits, works, generations)
        if self.model.device.type == "cuda" and not len(rows):
            torch.cuda.synchronize(self.model.device)
        if self.hot is None or resolver is None:
            return Stepped(rows)
        ended = self.hot.ended(resolver)
        return Stepped(rows, {*ended.lost, *ended.parked}, ended.lost)

    def choose(self, work: Work, generation: Generation, rows: Iterator[Row]) -> bool:
        """Account for one work: score its part of a prompt, and append a token if one is due (then True).
        True also for one that can't go on: it is `broken`."""
        request, due, scored = work.request, work.samples, work.scored
        # Its rows are taken first, whatever becomes of them: the next ones are others'.
        told, last = [next(rows) for _ in scored], next(rows) if due else None
        request.computed = work.end
        if request.fresh and work.end >= request.prompt_tokens - 1:
            request.fresh = False  # all that was wanted is told; should it come back, it may use what is cached
        try:
            if told:
                self._score(generation, scored, told)
            if last is None:
                return False
            if isinstance(last, int):
                chosen = Sampled(last)
            else:
                chosen = sample(last, generation.ask.sampling, len(request.tokens), generation.adjustment)
        except NoToken as error:
            generation.broken = str(error)
            return True
        request.tokens.append(chosen.token)
        if generation.adjustment is not None:
            generation.adjustment.append(chosen.token)
        self.holdings.holding(request).chain.extend([chosen.token])
        self.outbox.token(generation.key, generation.emitted - 1, chosen)
        return True

    def _score(self, generation: Generation, scored: range, rows: Sequence[Row]) -> None:
        count = generation.ask.sampling.prompt_logprobs or 0
        tokens = generation.request.tokens
        scores = [
            score(row, tokens[position + 1], count)
            for row, position in zip(rows, scored, strict=True)
            if not isinstance(row, int)  # none of a prompt's is
        ]
        self.outbox.scores(generation.key, scored.start + 1, scores)
