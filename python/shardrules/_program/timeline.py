"""What a device computes and sends in a loop's body, one thing behind or beside the other.

The lines of a scheduled module are in the order in which a device begins them. A collective is
either one line, for which the device waits, or starts at one line and is done at another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from shardrules._base.text import answer, counted, printable, printable_lines, record, seconds_shown
from shardrules._plan.tables import Column, Table
from shardrules._program.collectives import Collective
from shardrules._program.computation import Instruction
from shardrules._program.hlo import Hlo

# On TPU, one fusion starts a collective, others go on with it beside what they compute, and one is
# done with it. All have a copy of its line.
_FUSED_DONE: Final = re.compile(r'custom_call_target="AsyncCollectiveDone"')
_CHANNEL: Final = re.compile(r'channel_id=(\d+).*?chain_id="(\d+)"')
_RUNS: Final = re.compile(r" (?:while|call|conditional|[a-z-]+-(?:start|update|done))\(")
_WINDOW: Final = "windowed_dot_general_body"
"""Of the name of a loop that XLA has made of a product and a collective: a part of its body."""
_MOST_LOOPS: Final = 2
_LEAST_SHARE: Final = 0.1
"""Of the time of the largest loop, that another one takes to be shown."""
_SHORTEST: Final = 0.001
"""Of a body, the share of time below which what is computed counts to what is before it."""
_ROUNDED: Final = 1e-9
_COLUMNS: Final = (
    Column("takes", is_right=True), Column("waits", is_right=True), Column("what", is_elided=True),
)  # fmt: skip


@record
class Span(NamedTuple):
    """Part of a time line: something that is computed or sent, from when to when."""

    kind: Literal["computing", "sending"]
    what: str
    """The scope or line of what is computed; of what is sent its kind and mesh axes."""
    begin: float
    """Seconds from the beginning of the body."""
    end: float
    """The same; of a collective when the device is done with it."""
    seconds: float
    """Seconds that it takes: of a collective by bytes and links, which may be less than it has."""
    exposed: float = 0.0
    """Of a collective, the seconds for which the device waits."""

    def __str__(self) -> str:
        waits = f", waits {seconds_shown(self.exposed)}" if self.exposed else ""
        return printable(f"{self.what}: {seconds_shown(self.seconds)}{waits}")


@answer
class Timeline(NamedTuple):
    """What a device computes and sends in one trip of a loop, such as one layer: an estimate."""

    name: str
    """What it is of: "forward", "backward", another "loop", or "step" for what is in no loop."""
    times: int
    """Trips of the loop in a step."""
    spans: tuple[Span, ...]
    """In the order in which they begin."""

    @property
    def seconds(self) -> float:
        """Seconds of a trip, with those of waiting."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def sending(self) -> float:
        """Seconds of what is sent, hidden or not."""
        return sum(span.seconds for span in self.spans if span.kind == "sending")

    @property
    def exposed(self) -> float:
        """Seconds for which the device waits for what is sent."""
        return sum(span.exposed for span in self.spans)

    def to_json(self) -> dict[str, Any]:
        """Return the spans and their sums as `json.dumps` takes them."""
        return {
            "name": self.name,
            "times": self.times,
            "seconds": self.seconds,
            "text": self._summary(),
            "spans": [span._asdict() for span in self.spans],
        }

    def _summary(self) -> str:
        computing = sum(span.seconds for span in self.spans if span.kind == "computing")
        hidden = hidden_of(self.sending, self.exposed)
        return (
            f"{self.name}, {counted(self.times, 'time')}: {seconds_shown(self.seconds)}, of which "
            f"{seconds_shown(computing)} computing; {seconds_shown(self.sending)} sending, of "
            f"which {seconds_shown(hidden)} hidden, {seconds_shown(self.exposed)} exposed"
        )

    def __str__(self) -> str:
        rows = [
            (seconds_shown(span.seconds), seconds_shown(span.exposed) if span.exposed else "",
             span.what)
            for span in self.spans
        ]  # fmt: skip
        return printable_lines([self._summary(), *Table(_COLUMNS, rows).lines()])


def hidden_of(sending: float, exposed: float) -> float:
    """Return the seconds of what is sent without those of waiting; what rounding leaves is 0."""
    return sending - exposed if sending - exposed > _ROUNDED * sending else 0.0


class _Body(NamedTuple):
    """A computation: what it has in its time, and without the loops in it."""

    spans: tuple[Span, ...]
    seconds: float
    exposed: float
    own: float
    """Seconds without those of loops."""


class Timetable:
    """The time of each computation of a module, as its lines are scheduled."""

    def __init__(
        self, hlo: Hlo, computing: Mapping[str, tuple[str, float]], sent: Mapping[str, float],
        collectives: Iterable[Collective],
    ) -> None:  # fmt: skip
        """Read which lines start collectives, and which are done with them.

        By instruction, `computing` has what is computed and its seconds in one execution, `sent`
        the seconds of a collective in a step.
        """
        self._hlo = hlo
        self._computing = computing
        self._sent = sent
        self._shown = {row.name: f"{row.kind} over {', '.join(row.axes)}" for row in collectives}
        self._bodies: dict[str, _Body] = {}
        # Of each line of a schedule the collective, and whether it goes on behind the line.
        self._starts: dict[str, tuple[str, bool]] = {}
        channels: dict[tuple[str, ...], str] = {}
        for op in hlo.collectives:
            name, is_async = self._line_of(op.computation, op.instruction)
            self._starts[name] = op.instruction.name, is_async
            if channel := _CHANNEL.search(op.instruction.attributes):
                channels[channel.groups()] = name
        self._fused_dones: dict[str, str] = {}
        for name, computation in hlo.computations.items():
            if hlo.contains(name, _FUSED_DONE) and (fusion := hlo.fusion_of(name)):
                for match in computation.matches(_CHANNEL):
                    if match.groups() in channels:
                        self._fused_dones[fusion[1].name] = channels[match.groups()]

    def _line_of(self, computation: str, instruction: Instruction) -> tuple[str, bool]:
        """Return the line of a schedule that a collective is in, and whether it only starts it."""
        is_async = instruction.opcode.endswith("-start")
        while callers := list(self._hlo.callers(computation)):
            name, caller = callers[0]
            if caller.opcode not in ("fusion", "fusion-start", "async-start"):
                break
            is_async |= caller.opcode.endswith("-start") or self._hlo.is_async_start(computation)
            computation, instruction = name, caller
        return instruction.name, is_async

    @property
    def hidden(self) -> float:
        """Seconds of a step in which a device sends beside what it computes."""
        body = self._of(self._hlo.entry)
        sending = sum(span.seconds for span in body.spans if span.kind == "sending")
        return hidden_of(sending, body.exposed)

    def _of(self, name: str) -> _Body:
        if name not in self._bodies:
            self._bodies[name] = _Body((), 0.0, 0.0, 0.0)  # of a computation that calls itself
            self._bodies[name] = _Clock(self, name).body()
        return self._bodies[name]

    def timelines(self, phases: Mapping[str, str]) -> Iterator[Timeline]:
        """Yield those of the loops that take most, or of the step if nothing is in loops."""
        self._of(self._hlo.entry)
        times = {name: self._hlo.times(name) or 1 for name in self._bodies}
        loops = [name for name in self._bodies if name != self._hlo.entry and _WINDOW not in name]
        rows = [(times[name] * self._bodies[name].own, name) for name in loops]
        rows = sorted(rows, reverse=True)[:_MOST_LOOPS]
        shown = [name for seconds, name in rows if seconds > _LEAST_SHARE * rows[0][0]]
        order = list(self._bodies)
        for name in sorted(shown, key=order.index) or [self._hlo.entry]:
            present = {phases[line] for line in self._hlo[name].lines if line in phases}
            phase = next((word for word in ("backward", "forward") if word in present), "loop")
            phase = "step" if name == self._hlo.entry else phase
            if self._bodies[name].spans:
                yield Timeline(phase, times[name], self._bodies[name].spans)


class _Clock:
    """Runs a computation line by line: when each begins, and what the device waits for."""

    def __init__(self, timetable: Timetable, name: str) -> None:
        self._timetable = timetable
        self._name = name
        self._times = timetable._hlo.times(name) or 1
        self._spans: list[Span] = []
        self._now = self._links = self._exposed = self._own = 0.0
        self._going: dict[str, tuple[str, float, float]] = {}
        """Of what is started: the collective, when that was, and when it is there at best."""

    def body(self) -> _Body:
        """Return what takes the time of a computation."""
        timetable = self._timetable
        for name, line in timetable._hlo[self._name].lines.items():
            if name in timetable._computing:
                self._compute(*timetable._computing[name])
            if name in timetable._starts:
                self._start(name, *timetable._starts[name])
            elif name in timetable._fused_dones:
                self._wait(timetable._fused_dones[name])
            elif _RUNS.search(line):
                self._run(timetable._hlo[self._name][name])
        for name in list(self._going):
            self._wait(name)
        return _Body(tuple(self._merged()), self._now, self._exposed, self._own)

    def _compute(self, what: str, seconds: float) -> None:
        begin, self._now = self._now, self._now + seconds
        self._own += seconds
        self._spans.append(Span("computing", what, begin, self._now, seconds))

    def _start(self, name: str, collective: str, is_async: bool) -> None:
        seconds = self._timetable._sent.get(collective, 0.0) / self._times
        # One after the other: what has been started before has the links.
        self._links = max(self._now, self._links) + seconds
        self._going[name] = collective, self._now, self._links
        if not is_async:
            self._wait(name)

    def _wait(self, name: str) -> None:
        if name not in self._going:
            return
        collective, begin, ready = self._going.pop(name)
        exposed = max(0.0, ready - self._now)
        self._now += exposed
        self._own += exposed
        self._exposed += exposed
        seconds = self._timetable._sent.get(collective, 0.0) / self._times
        if seconds:
            what = self._timetable._shown[collective]
            self._spans.append(Span("sending", what, begin, self._now, seconds, exposed))

    def _run(self, line: Instruction) -> None:
        """Run what a line calls, or end what it is done with."""
        if line.opcode in ("call", "conditional", "while"):
            names = line.called.get("body", ()) if line.opcode == "while" else line.callees
            for name in names:
                self._enter(name)
        elif line.opcode.endswith("-update") and line.operands[0] in self._going:
            self._going[line.name] = self._going.pop(line.operands[0])
        elif line.opcode.endswith("-done"):
            self._wait(line.operands[0])

    def _enter(self, name: str) -> None:
        body = self._timetable._of(name)
        trips = (self._timetable._hlo.times(name) or 1) / self._times
        begin, self._now = self._now, self._now + trips * body.seconds
        self._exposed += trips * body.exposed
        if _WINDOW in name:
            self._own += trips * body.seconds
        for kind in ("computing", "sending"):  # one span of each, by what takes most of it
            if spans := [span for span in body.spans if span.kind == kind]:
                what = max(spans, key=lambda span: span.seconds).what
                seconds = trips * sum(span.seconds for span in spans)
                exposed = trips * sum(span.exposed for span in spans)
                self._spans.append(Span(kind, what, begin, self._now, seconds, exposed))

    def _merged(self) -> list[Span]:
        """Return the spans as they begin, with neighbours of one scope or line together."""
        shortest = _SHORTEST * self._now
        merged = [span for span in self._spans if span.kind == "sending"]
        row: list[Span] = []
        for span in self._spans:
            if span.kind == "sending":
                continue
            last = row[-1] if row else None
            is_next = last is not None and span.begin - last.end <= shortest
            if last and is_next and (span.what == last.what or span.seconds < shortest):
                row[-1] = last._replace(end=span.end, seconds=last.seconds + span.seconds)
            else:
                row.append(span)
        return sorted(merged + row, key=lambda span: span.begin)
