"""Output: what people see of a machine and a plan. Readable without colour, made for 80 columns.

Renders values into rich text; decides nothing. Results go to standard output, talk to standard
error.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zenlaunch.compose import Composed, inherited, shell_words
from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import LaunchError, ZenlaunchError
from zenlaunch.memory import gib
from zenlaunch.plan import Plan
from zenlaunch.stdout import ReaderGoneError, write_line
from zenlaunch.topology import Core, Note, Severity, Topology
from zenlaunch.values import printable

WIDTH = 80
# One letter an instance, upper and lower case in turn; p, r and x mean something else.
_LETTERS = "ABCDEFGHIJKLMNOQSTUVWYZ"
_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that never wraps our text: a pasted command must stay whole."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH
    return _Console(stderr=stderr, width=width, soft_wrap=True, highlight=False, markup=False)


class _Console(Console):
    """A console that lets the entry point decide what a reader that has gone means."""

    def on_broken_pipe(self) -> None:
        raise ReaderGoneError


def print_error(error: ZenlaunchError, console: Console) -> None:
    """Print what is wrong, the last log lines if there are any, and what to do."""
    console.print(Text.assemble(("error: ", "bold red"), error.message))
    if isinstance(error, LaunchError):
        for line in error.log_tail:
            # An engine's own line: it may hold the beginning of an escape sequence, or a bell.
            console.print(Text(f"  {printable(line.expandtabs())}", style="dim"))
    if error.hint:
        console.print(Text(textwrap.indent(error.hint, "  ")))


def print_topology(topology: Topology, console: Console) -> None:
    """Print a headline, a table of the nodes and a picture of the machine."""
    console.print(Text(headline(topology), style="bold"))
    console.print()
    console.print(_node_table(topology))
    picture = machine_picture(topology)
    if picture:
        console.print(*picture, sep="\n")
        console.print()
    facts = [f"online {topology.online}"]
    if topology.offline:
        facts.append(f"offline {topology.offline}")
    if topology.allowed_cpus is not None and topology.allowed_cpus != topology.online:
        facts.append(f"allowed {topology.allowed_cpus}")
    if topology.allowed_mems is not None:
        facts.append(f"memory nodes allowed {topology.allowed_mems}")
    console.print("; ".join(facts))
    print_notes(topology.notes, console)


def headline(topology: Topology) -> str:
    """Return model, sockets, nodes (with NPS where it is plain), cores, SMT and memory.

    In one line, or in two where that is too long.
    """
    sockets, nodes = len(topology.packages), [n for n in topology.nodes if n.cpus]
    parts = [f"{sockets} socket{'s' * (sockets != 1)}" if sockets else "sockets unknown"]
    if topology.nodes:
        text = f"{len(topology.nodes)} NUMA node{'s' * (len(topology.nodes) != 1)}"
        if sockets and len(nodes) % sockets == 0 and topology.machine.vendor == "AuthenticAMD":
            text += f" (NPS{len(nodes) // sockets})"
        parts.append(text)
    else:
        parts.append("no NUMA nodes shown")
    if topology.cores:
        parts.append(f"{len(topology.cores)} cores")
    else:
        parts.append(f"{len(topology.online)} CPUs, cores not shown")
    if topology.threads_per_core is not None:
        parts.append("SMT off" if topology.threads_per_core == 1 else
                     f"SMT on ({topology.threads_per_core} a core)")  # fmt: skip
    elif topology.cores:
        parts.append("SMT mixed")
    memory = [n.memory_bytes for n in topology.nodes if n.memory_bytes is not None]
    if memory:
        parts.append(gib(sum(memory)))
    model, rest = topology.machine.model or "unknown CPU model", ", ".join(parts)
    line = f"{model}   {rest}"
    return line if len(line) <= WIDTH else f"{model}\n  {rest}"


def machine_picture(topology: Topology) -> list[Text]:
    """Draw each socket's nodes, one group an L3 domain, one figure a core (its number of CPUs)."""
    if not topology.cores:
        return []
    allowed = topology.usable_cpus
    by_node: dict[tuple[int | None, int | None], list[Core]] = {}
    for core in topology.cores:
        by_node.setdefault((core.package, core.node), []).append(core)
    lines: list[Text] = []
    last: object = object()
    for (package, node), cores in sorted(
        by_node.items(), key=lambda item: tuple(-1 if k is None else k for k in item[0])
    ):
        if package != last:
            lines.append(Text("socket ?" if package is None else f"socket {package}"))
            last = package
        label = " node ?" if node is None else f" node {node}"

        def mark(core: Core) -> tuple[str, str]:
            usable = core.cpus & allowed
            return (str(len(core.cpus)), "") if usable else ("x", "dim")

        lines += _rows(label, _grouped(cores), mark)
    legend = "one figure = one core and its number of CPUs"
    if any(not core.cpus & allowed for core in topology.cores):
        legend += ", x = not allowed here"
    if topology.l3:
        legend += "; one group = one L3 (CCX/CCD)"
    lines.append(Text(legend, style="dim"))
    return lines


def print_plan(composed: Composed, console: Console, environ: dict[str, str]) -> None:
    """Print the map, a command per instance with its reason, the memory ledger and the notes."""
    plan = composed.plan
    console.print(Text(headline(composed.topology), style="bold"))
    engine = composed.choice.title
    if composed.sizes.weights_bytes is not None:
        engine += f"   weights {gib(composed.sizes.weights_bytes)} {composed.sizes.dtype or ''}"
    console.print(Text(engine.rstrip()))
    console.print()
    console.print(*plan_map(composed.topology, plan), sep="\n")
    for instance, spec in zip(plan.instances, composed.specs, strict=True):
        console.print()
        reason = f"{instance.name}: {instance.reason}"
        for line in textwrap.wrap(reason, WIDTH - 2, subsequent_indent="    "):
            console.print(Text(f"# {line}", style="dim"))
        # Not through rich: it would turn a tab into blanks.
        write_line(_command(shell_words(spec)))
    console.print()
    if plan.memory:
        console.print(_ledger_table(plan))
    print_notes(plan.notes, console)
    if composed.specs and (removed := inherited(composed.specs[0], environ)):
        print_note(
            "note", f"set here and taken out for the instances: {', '.join(removed)}.", console
        )


def print_steps(plan: Plan, console: Console) -> None:
    """Print the planner's numbered steps with the sets after each."""
    for number, step in enumerate(plan.steps, 1):
        console.print(Text(f"{number}. {step.text}", style="bold"))
        for name, cpus in step.sets:
            console.print(f"   {name:<8} {str(cpus) or '-'}   ({len(cpus)})")


def plan_map(topology: Topology, plan: Plan) -> list[Text]:
    """Draw one letter a core: its instance, r reserved, p proxy, . spare, x not used."""
    marks: dict[int, tuple[str, str]] = {}
    for cpu in plan.spare_cpus:
        marks[cpu] = (".", "dim")
    for k, instance in enumerate(plan.instances):
        colour = _COLOURS[k % len(_COLOURS)]
        for cpu in instance.engine_cpus:
            marks[cpu] = (instance_letter(k), colour)
        for cpu in instance.reserved_cpus:
            marks[cpu] = ("r", colour)
    alone = plan.proxy.cpus - CpuSet(c for i in plan.instances for c in i.cpus)
    cores = topology.cores or tuple(
        Core(id=cpu, cpus=CpuSet([cpu]), node=node.id)
        for node in topology.nodes
        for cpu in node.cpus
    )
    sibling = False
    for core in cores:
        if core.cpus & alone:
            owner = [c for c in core.cpus if c in marks and c not in alone]
            sibling = sibling or bool(owner)
            if not owner:
                for cpu in core.cpus & alone:
                    marks[cpu] = ("p", "bold")

    def mark(core: Core) -> tuple[str, str]:
        return next((marks[cpu] for cpu in core.cpus if cpu in marks), ("x", "dim"))

    by_node: dict[int | None, list[Core]] = {}
    for core in cores:
        by_node.setdefault(core.node, []).append(core)
    lines: list[Text] = []
    for node in sorted(by_node, key=lambda n: -1 if n is None else n):
        label = "cores" if node is None else f"node {node}"
        lines += _rows(label, _grouped(by_node[node]), mark)
    names = [f"{instance_letter(k)} = {i.name}" for k, i in enumerate(plan.instances)]
    used = {mark(core)[0] for core in cores}
    names += [
        text
        for letter, text in (
            ("r", "r = reserved"), ("p", "p = proxy"), (".", ". = spare"), ("x", "x = not used"),
        )
        if letter in used
    ]  # fmt: skip
    if topology.l3:
        names.append("one group = one L3 (CCX/CCD)")
    legend = textwrap.wrap("   ".join(names), WIDTH - 8)
    lines += [Text(f"        {line}", style="dim") for line in legend]
    if plan.proxy.cpus and sibling:
        lines.append(
            Text(f"        proxy on CPU {plan.proxy.cpus}, the idle SMT sibling of a reserved core",
                 style="dim")
        )  # fmt: skip
    elif plan.proxy.cpus and not alone:
        lines.append(Text(f"        proxy on CPU {plan.proxy.cpus}, shared", style="dim"))
    elif not plan.proxy.cpus:
        lines.append(Text("        the proxy is not pinned", style="dim"))
    return lines


def instance_letter(k: int) -> str:
    """Return the letter of the k-th instance; letters repeat after 46."""
    letter = _LETTERS[k % len(_LETTERS)]
    upper = (k + k // len(_LETTERS)) % 2 == 0
    return letter if upper else letter.lower()


def _grouped(cores: Iterable[Core]) -> list[list[Core]]:
    groups: dict[int | None, list[Core]] = {}
    for core in sorted(cores, key=lambda c: c.id):
        groups.setdefault(core.l3, []).append(core)
    return list(groups.values())


def _rows(label: str, groups: Sequence[Sequence[Core]], mark: object) -> list[Text]:
    """Lay groups out in lines of at most 80 columns; a long group is broken."""
    assert callable(mark)
    room = WIDTH - 8
    pieces = [group[i : i + room] for group in groups for i in range(0, len(group), room)]
    lines: list[Text] = []
    line = Text()
    for piece in pieces:
        if len(line) and len(line) + 1 + len(piece) > room:
            lines.append(line)
            line = Text()
        if len(line):
            line.append(" ")
        for core in piece:
            letter, style = mark(core)
            line.append(letter, style=style or None)
    lines.append(line)
    return [Text.assemble(f"{label if i == 0 else '':<8}", text) for i, text in enumerate(lines)]


def _node_table(topology: Topology) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("node", "socket", "cores", "CPUs", "L3", "memory", "free now", "distances"):
        table.add_column(name, justify="left" if name in ("CPUs", "distances") else "right",
                         overflow="fold")  # fmt: skip
    for node in topology.nodes:
        cores = [c for c in topology.cores if c.node == node.id]
        table.add_row(
            str(node.id),
            "?" if node.package is None else str(node.package),
            str(len(cores)) if topology.cores else "?",
            str(node.cpus) or "none",
            str(len({c.l3 for c in cores if c.l3 is not None})) if topology.l3_known else "?",
            "?" if node.memory_bytes is None else gib(node.memory_bytes),
            "?" if node.free_bytes is None else gib(node.free_bytes),
            " ".join(str(d) for d in node.distances.values()) if len(topology.nodes) <= 8 else "…",
        )
    return table


def _ledger_table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("memory", "node", "total", "weights", "KV cache", "overhead", "left"):
        table.add_column(name, justify="right" if name != "memory" else "left")
    for row in plan.memory:
        here = [i for i in plan.instances if row.node in i.mem_nodes]
        each, n = here[0].memory, len(here)
        left = None
        if row.available_bytes is not None and row.planned_bytes is not None:
            left = row.available_bytes - row.planned_bytes
        table.add_row(
            "",
            str(row.node),
            _size(row.total_bytes),
            _times(n, each.weights_bytes),
            _times(n, each.kv_bytes),
            _times(n, each.overhead_bytes),
            _size(left),
        )
    return table


def _size(n: int | None) -> str:
    return "unknown" if n is None else gib(n)


def _times(count: int, n: int | None) -> str:
    return "unknown" if n is None else f"{count} x {gib(n)}" if count > 1 else gib(n)


def _command(groups: Sequence[Sequence[str]]) -> str:
    """Break a command into lines that a shell joins again; "-u NAME" stays together."""
    lines = []
    for k, group in enumerate(groups):
        line = "" if k == 0 else " "
        for word in shlex.join(group).replace(" -u ", " -u\0").split(" "):
            if len(line) + len(word) > WIDTH - 3 and line.strip():
                lines.append(line)
                line = "   "
            line += (" " if line else "") + word.replace("\0", " ")
        lines.append(line)
    return " \\\n".join(lines)


def print_notes(notes: Iterable[Note], console: Console) -> None:
    for note in notes:
        word = "note" if note.severity is Severity.INFO else note.severity.value
        print_note(word, note.text, console)


def print_note(word: str, text: str, console: Console) -> None:
    style = {"warning": "yellow", "error": "bold red"}.get(word, "dim")
    indent = " " * (len(word) + 2)
    wrapped = textwrap.fill(text, WIDTH - len(indent), break_long_words=False,
                            break_on_hyphens=False)  # fmt: skip
    body = textwrap.indent(wrapped, indent).strip()
    console.print(Text.assemble((f"{word}  ", style), body))
