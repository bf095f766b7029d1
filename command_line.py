"""From a command line to a configuration: which flags there are, and what is said of those that can not be.

`--algo`, `--env` and `--loss` are looked at first, because the knobs of the chosen algorithm stand at the top level
(`--algo rae --decay 0.9`) and those of the environment and the loss under their prefix (`--env.max-words 3`, `--loss.eps 0.2`).
What belongs to another choice is refused, and `--help` shows just what applies. The knobs themselves are in config.py.
"""

import dataclasses
import difflib
import json
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro

from config import CHOICES, SOURCE_CHOICES, Config, Run, check_env, config_class, fail, name_of, option
from curriculum import AdvRangeConfig
from envs import ENVS, Env

HELP = {
    "algo": "who assigns credit; its knobs stand beside this one",
    "env": "what is played; its knobs begin with --env.",
    "sampler": "which task comes next; pools are named in a config file",
    "loss": "the rl component; its knobs begin with --loss.",
}
REQUIRED = object()  # in place of a default: the command line must say it


@dataclass
class GateFlags:
    """Reject groups whose advantages all lie in a range. A config file can name any number of such gates."""

    reject_min: float | None = None
    """lower end of the rejected range, itself in it (0 if only the other end is given)"""
    reject_max: float | None = None
    """upper end of the rejected range, itself in it (0 if only the other end is given)"""


def parse(args: Sequence[str]) -> tuple[Config, list[str]]:
    """The configuration that a command line asks for, resolved and checked, and lines to show at the start.

    Exits with code 2 and a message that names the option where the command line or the config file is wrong.
    """
    args, notes = list(args), []
    from_a_file = bool(args) and not args[0].startswith("-")
    base = read_config_file(args.pop(0)) if from_a_file else Config()
    began = _run_to_resume(args, base)
    if began is not None:  # without a checkpoint of its own it begins where it began before
        base = dataclasses.replace(base, resume_from=began.resume_from) if from_a_file else began
        from_a_file = True
    source, several = base.sources[0], len(base.sources) > 1
    given = {kind: getattr(source, kind) for kind in SOURCE_CHOICES} | {"loss": base.loss}

    flags: dict[str, tuple[Any, Any]] = {}  # name -> (annotated type, default)
    for kind, classes in CHOICES.items():
        asked = asked_for(args, kind)
        if several and kind in SOURCE_CHOICES:
            if asked:
                fail(f"--{kind} {asked}: the config file has {len(base.sources)} sources; change it there")
            continue
        if asked and asked not in classes:
            fail(f"--{kind} {asked}: choose one of {', '.join(classes)}")
        known = name_of(classes, given[kind])
        chosen = asked or known
        knobs_class = config_class(classes, chosen)
        if chosen != known:
            if from_a_file:
                notes.append(f"--{kind} {chosen} replaces the config file's {known} and drops its knobs")
            given[kind] = REQUIRED if _needs_values(knobs_class) else knobs_class()
        flags[kind] = Annotated[Literal[tuple(classes)], tyro.conf.arg(help=HELP[kind])], chosen
        if kind != "sampler":  # pools have names: they are the config file's
            flags[f"{kind}_knobs"] = (
                Annotated[knobs_class, tyro.conf.arg(name="" if kind == "algo" else kind)],
                given[kind],
            )
    if not several:
        gate = source.gates.get("gate")
        flags["group_size"] = Annotated[int, tyro.conf.arg(help="rollouts of one task")], source.group_size
        flags["gate"] = GateFlags, GateFlags(gate.reject_min, gate.reject_max) if gate else GateFlags()
    run = Run(**{f.name: getattr(base, f.name) for f in dataclasses.fields(Run)})
    flags["run"] = Annotated[Run, tyro.conf.arg(name="")], run

    parsed = _read_flags(flags, args, "RL post-training for language models.", several)
    try:
        sources = base.sources
        if not several:
            gates = source.gates
            if (parsed.gate.reject_min, parsed.gate.reject_max) != (None, None):
                gates = gates | {"gate": AdvRangeConfig(parsed.gate.reject_min or 0.0, parsed.gate.reject_max or 0.0)}
            sources = [
                dataclasses.replace(
                    source,
                    env=parsed.env_knobs,
                    algo=parsed.algo_knobs,
                    sampler=given["sampler"],
                    gates=gates,
                    group_size=parsed.group_size,
                )
            ]
        config = Config(**vars(parsed.run), sources=sources, loss=parsed.loss_knobs).resolved()
        warnings = config.check()
    except ValueError as error:
        fail(str(error))
    except (TypeError, AttributeError) as error:
        fail(f"the config file holds a value of a wrong type: {error}")
    if began is not None and (config.model, config.sources) != (began.model, began.sources):
        what = "model" if config.model != began.model else "environments and algorithms"
        fail(f"--resume: the run {config.name} has other {what}; --resume-from begins a new run from its checkpoint")
    return config, notes + [f"warning: {warning}" for warning in warnings]


def parse_beside_env(args: Sequence[str], knobs: type, env: str | None, description: str) -> tuple[Any, Env | None]:
    """(knobs, environment) that the command line of another script asks for: a dataclass whose fields stand at the top level, and
    `--env` with its own; `env` is the default. Both are checked, and mistakes end as in `parse`."""
    asked = asked_for(args, "env")
    if asked and asked not in ENVS:
        fail(f"--env {asked}: choose one of {', '.join(ENVS)}")
    chosen = asked or env
    names = Literal[tuple(ENVS)] if env else Literal[tuple(ENVS)] | None
    flags = {
        "env": (Annotated[names, tyro.conf.arg(help=HELP["env"])], chosen),
        "knobs": (Annotated[knobs, tyro.conf.arg(name="")], knobs()),
    }
    if chosen:
        env_class = config_class(ENVS, chosen)
        default = REQUIRED if _needs_values(env_class) else env_class()
        flags["env_knobs"] = Annotated[env_class, tyro.conf.arg(name="env")], default
    parsed = _read_flags(flags, args, description)
    played = parsed.env_knobs if chosen else None
    try:
        parsed.knobs.check()
        if played is not None:
            check_env(played)
    except ValueError as error:
        fail(str(error))
    return parsed.knobs, played


def parse_knobs(args: Sequence[str], knobs: type, description: str) -> Any:
    """The dataclass `knobs` as a command line sets it, for a script with no other options; checked, and mistakes end as in `parse`."""
    flags = {"knobs": (Annotated[knobs, tyro.conf.arg(name="")], knobs())}
    parsed = _read_flags(flags, args, description)
    try:
        parsed.knobs.check()
    except ValueError as error:
        fail(str(error))
    return parsed.knobs


def _read_flags(flags: dict[str, tuple[Any, Any]], args: Sequence[str], description: str, several: bool = False) -> Any:
    """An object with a field for each of `flags`, name -> (annotated type, default), as the command line sets it."""
    _refuse_foreign_options(args, flags, several)
    fields = [
        (name, kind, *([] if default is REQUIRED else [field(default_factory=lambda value=default: value)]))
        for name, (kind, default) in flags.items()
    ]
    command_line = dataclasses.make_dataclass("nanopost", fields, kw_only=True)
    return tyro.cli(command_line, args=args, prog=Path(sys.argv[0]).name, description=description, registry=TABLES)


WORDS = {"true": True, "false": False, "none": None}
TABLES = tyro.constructors.ConstructorRegistry()


@TABLES.primitive_rule
def _table(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """A dict is one flag that replaces the whole table: --roles tool=0.25 user=0.05."""
    if get_origin(info.type) is not dict:
        return None
    value_type = get_args(info.type)[1]

    def parse_value(text: str) -> Any:
        if value_type is float:
            return float(text)
        if text.lower() in WORDS:
            return WORDS[text.lower()]
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def parse_table(items: list[str]) -> dict[str, Any]:
        pairs = [item.partition("=") for item in items]
        if not all(separator for _, separator, _ in pairs):
            raise ValueError("each entry is NAME=VALUE")
        return {name: parse_value(value) for name, _, value in pairs}

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME=VALUE ...",
        instance_from_str=parse_table,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda table: [f"{name}={value}" for name, value in table.items()],
    )


def read_config_file(path: str) -> Config:
    """Run a config file and take its `config`."""
    if not Path(path).is_file():
        fail(f"{path}: no such config file (flags begin with --)")
    try:
        found = runpy.run_path(path)
    except (Exception, SystemExit) as error:
        line = _line_in(error, path)
        fail(f"{path}{line}: {type(error).__name__}: {error}")
    config = found.get("config")
    if not isinstance(config, Config):
        fail(
            f"{path}: must define `config = Config(...)`, found {'no `config`' if config is None else type(config).__name__}"
        )
    if not config.sources:
        fail(f"{path}: sources must hold at least one Source")
    try:
        config.check_types()
    except ValueError as error:
        fail(f"{path}: {error}")
    return config


def _run_to_resume(args: Sequence[str], base: Config) -> Config | None:
    """The configuration of the run that --resume continues, if it has begun."""
    if "--resume" not in args and not base.resume:
        return None
    other = asked_for(args, "resume-from") or asked_for(args, "resume_from") or base.resume_from
    if other is not None:
        fail(f"--resume-from {other}: begins a new run; leave --resume out")
    name = asked_for(args, "name") or base.name
    if name is None:
        fail("--resume: needs the --name of the run that it continues")
    path = Path(asked_for(args, "runs-dir") or asked_for(args, "runs_dir") or base.runs_dir) / name / "config.json"
    try:
        return Config.from_dict(json.loads(path.read_text())) if path.exists() else None
    except KeyError as error:
        fail(
            f"--resume: {path} names {error}, which is not known here; if a config file defines it, begin with that: train.py FILE.py --resume"
        )
    except (OSError, ValueError, TypeError, StopIteration) as error:
        fail(f"--resume: {path} is no configuration of this version: {type(error).__name__}: {error}")


def asked_for(args: Sequence[str], name: str) -> str | None:
    """The last value of --name on the command line."""
    asked = None
    for i, arg in enumerate(args):
        if arg == f"--{name}":
            if i + 1 == len(args) or args[i + 1].startswith("--"):
                fail(f"--{name}: a value is missing")
            asked = args[i + 1]
        elif arg.startswith(f"--{name}="):
            asked = arg.split("=", 1)[1]
    return asked


def _needs_values(knobs: type) -> bool:
    """Whether some knob has no default."""
    return any(
        f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING for f in dataclasses.fields(knobs)
    )


def _options_of(knobs: type, prefix: str = "") -> set[str]:
    """All flags of a dataclass, nested ones included."""
    options = set()
    for f in dataclasses.fields(knobs):
        name = prefix + f.name.replace("_", "-")
        options |= {f"--{name}", "--" + (prefix + "no-" + f.name.replace("_", "-"))}
        if dataclasses.is_dataclass(f.type):
            options |= _options_of(f.type, name + ".")
    return options


# What people bring from other projects, and where it went.
ELSEWHERE = {
    "--tensor-parallel-size": "one engine runs on one device; --ranks gives more devices an engine each",
}


def _refuse_foreign_options(args: Sequence[str], flags: dict[str, tuple[Any, Any]], several: bool) -> None:
    """Say of an option that does not apply here to whom it belongs, or what it may have been meant to be."""
    known = {"--help", "-h"}
    for name, (kind, _) in flags.items():
        knobs = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        prefix = {"env_knobs": "env.", "loss_knobs": "loss.", "gate": "gate."}.get(name, "")
        known |= _options_of(knobs, prefix) if dataclasses.is_dataclass(knobs) else {option(name)}
    for arg in args:
        flag = arg.split("=", 1)[0].replace("_", "-")
        if not flag.startswith("--") or flag in known:
            continue
        for kind, classes in CHOICES.items():
            if kind not in flags and not several:
                continue  # this script has no such choice
            prefix = "" if kind == "algo" else f"{kind}."
            owners = [name for name in classes if flag in _options_of(config_class(classes, name), prefix)]
            if owners and several and kind in SOURCE_CHOICES:
                fail(f"{flag}: the config file has several sources; set it there")
            if owners and kind == "sampler":
                fail(f"{flag}: set it in a config file")
            if owners:
                fail(f"{flag} belongs to --{kind} {' or '.join(owners)}; this run has --{kind} {flags[kind][1]}")
        if flag in ELSEWHERE:
            fail(f"{flag}: {ELSEWHERE[flag]}")
        close = difflib.get_close_matches(flag, known, 1)
        fail(f"{flag}: no such option{f'; did you mean {close[0]}?' if close else ''} (--help lists all)")


def _line_in(error: BaseException, path: str) -> str:
    """ ":line" of the deepest frame of the traceback that lies in the file at path."""
    lines, traceback = [], error.__traceback__
    while traceback:
        if traceback.tb_frame.f_code.co_filename == path:
            lines.append(traceback.tb_lineno)
        traceback = traceback.tb_next
    return f":{lines[-1]}" if lines else ""
