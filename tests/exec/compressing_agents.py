"""Pretended agents whose jobs compress their gradients, and say of it what workers would."""

from __future__ import annotations

from dataclasses import replace

from exec.controllers_agents import FakeAgent

from synergy_exec.messages import Launch, Message, Report, Retune, Started
from synergy_exec.training.compression.choices import SchemeByLayer
from synergy_exec.training.compression.scheme import GradientLayer

LAYERS = [("token.weight", 256, 128), ("up.weight", 512, 128), ("up.bias", 512, 1), ("down.weight", 128, 512)]
SPEEDS = {each: [1e10, 1e12, 1e-6] for each in ("half", "powersgd", "quantised", "topk")}
COMPUTE_S, SYNC_S = 0.2, 0.08
"""Of 32 samples, and of an uncompressed exchange."""


class ComputingAgent(FakeAgent):
    """An agent whose jobs exchange gradients for long, in proportion to the bytes that their compressor sends.

    codec_s: of any compressor, as long as the test likes.
    """

    codec_s = 2e-3
    error = 0.1

    def hear(self, message: Message, now_s: float) -> list[Message]:
        if isinstance(message, Retune) and message.run in self.runs:
            run = self.runs[message.run]
            told = {name: getattr(message, name) for name in ("micro_batch", "accumulation", "compressor")}
            run.launch = replace(run.launch, plan=replace(run.launch.plan, **told))
        return super().hear(message, now_s)

    def pass_time(self, now_s: float) -> list[Message]:
        launches = {number: run.launch for number, run in self.runs.items()}
        return [self._computed(each, launches[each.run]) for each in super().pass_time(now_s)]  # type: ignore[attr-defined]

    def _computed(self, said: Message, launch: Launch) -> Message:
        if isinstance(said, Started):
            layers = LAYERS if launch.say_layers else []
            return replace(said, layers=layers, codecs=SPEEDS if launch.time_codecs else {})
        if not isinstance(said, Report):
            return said
        plan = launch.plan
        choices, several = SchemeByLayer.named(plan.compressor), plan.data > 1
        known = [GradientLayer(*each) for each in LAYERS]
        schemes = [choices.of(each, plan.data) for each in known]
        sent = sum(each.sent_bytes(layer, plan.data) for each, layer in zip(schemes, known, strict=True))
        plain = sum(2 * (plan.data - 1) / plan.data * 4 * layer.numbers for layer in known)
        compresses = several and not choices.nothing
        sync_s = (SYNC_S * sent / plain + compresses * self.codec_s) if several else 0.0
        compute_s = COMPUTE_S * plan.micro_batch / 32
        return replace(
            said,
            step_s=compute_s * plan.accumulation + sync_s,
            sync_s=sync_s,
            sent_bytes=sent if several else 0.0,
            codec_s=self.codec_s if compresses else 0.0,
            compressor=plan.compressor,
            layers={"up.weight": [1.0, self.error]} if compresses else {},
        )
