"""Say for each engine whether a drafter's folder will load there, and if not, why.

Nothing is loaded and nothing downloaded: config, tensor headers and the files' names are compared
with what each engine's code reads. So a folder can be checked where none of them is installed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .doctor_engines import engine_findings
from .doctor_facts import ENGINES, FAULT, Facts, Finding, read_facts
from .doctor_rules import shared_findings
from .formats_dflash import REFUSED_FORMATS
from .serving import sglang_command, vllm_command

LOADS, FAULTY, NOT_FOR_IT = "loads", "faulty", "not for it"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one engine does with the folder."""

    engine: str
    state: str  # LOADS, FAULTY, or NOT_FOR_IT: another engine's format, and nothing wrong with it
    reason: str  # why it is not for this engine
    remedy: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Examination:
    """A drafter's folder, seen by every engine."""

    path: str
    format: str  # one of `wire_formats.FORMATS`, or what other method it is
    verdicts: tuple[Verdict, ...]
    commands: dict[str, str]  # how to serve or convert it, by engine

    @property
    def exit_code(self) -> int:
        """0 if it loads wherever its format is meant for, else 1."""
        states = {verdict.state for verdict in self.verdicts}
        return 1 if FAULTY in states or LOADS not in states else 0


def examine(
    path: str | Path, target: str | None = None, engines: Sequence[str] | None = None
) -> Examination:
    """Examine a drafter's folder.

    Args:
        path: The folder, in any format.
        target: Folder or Hub repository of its target, to check the pair as well.
        engines: The only engines to ask; each of them must then load it.

    Raises:
        FileNotFoundError: If a folder is not there.
        ValueError: If an engine is not known, or the folder has no readable `config.json`.
    """
    if unknown := sorted(set(engines or ()) - set(ENGINES)):
        raise ValueError(f"`engine` must be among {', '.join(ENGINES)}, got {unknown}.")
    facts = read_facts(path, target)
    findings = [*shared_findings(facts), *engine_findings(facts)]
    verdicts = []
    for engine in engines or ENGINES:
        verdict = _verdict(facts, engine, [f for f in findings if f.engine == engine])
        if engines and verdict.state == NOT_FOR_IT:
            finding = Finding(engine, FAULT, "format", verdict.reason, verdict.remedy)
            verdict = Verdict(engine, FAULTY, "", "", (finding,))
        verdicts.append(verdict)
    loads = {verdict.engine for verdict in verdicts if verdict.state == LOADS}
    commands = {e: c for e, c in _commands(facts, target).items() if e in loads}
    return Examination(str(path), facts.format or facts.kind, tuple(verdicts), commands)


def _verdict(facts: Facts, engine: str, findings: Sequence[Finding]) -> Verdict:
    refusal = _not_for(facts, engine)
    if refusal is not None:
        return Verdict(engine, NOT_FOR_IT, *refusal, findings=())
    is_faulty = any(finding.severity == FAULT for finding in findings)
    return Verdict(engine, FAULTY if is_faulty else LOADS, "", "", tuple(findings))


def _not_for(facts: Facts, engine: str) -> tuple[str, str] | None:
    """Why the folder's format is none that the engine reads, and what to do; None if it is."""
    if facts.format is None:
        return f"{REFUSED_FORMATS[facts.kind]}", "Another method; its own documentation says how."
    if engine in ("vllm", "sglang", "llama.cpp", "speculators") and facts.kind == "dflare":
        if _claims_dflash(facts):  # and the engine would believe it
            return None
        return "it has no DFlare drafters", "Serve it with this package, or with AngelSlim."
    return _NOT_FOR[engine](facts)


def _claims_dflash(facts: Facts) -> bool:
    return "DFlashDraftModel" in (facts.raw.get("architectures") or ())


def _not_for_package(facts: Facts) -> tuple[str, str] | None:
    if facts.kind == "speculators":
        return "it is vLLM speculators' format", _convert(facts, "hf-dflash")
    return None


def _not_for_transformers(facts: Facts) -> tuple[str, str] | None:
    if facts.kind == "native":
        return None
    if facts.kind == "speculators":
        return "transformers has no class for it", _convert(facts, "hf-dflash")
    reason = "AutoModel alone builds a random Qwen3 model from it and only warns"
    return reason, _convert(facts, "native" if facts.kind == "dflash" else "hf-dflash")


def _not_for_remote_code(facts: Facts) -> tuple[str, str] | None:
    if facts.raw.get("auto_map"):
        return None
    return "it has no code of its own (`auto_map`)", _convert(facts, "hf-dflash")


def _not_for_vllm(facts: Facts) -> tuple[str, str] | None:
    if facts.format == "angelslim":
        reason = "`architectures` is AngelSlim's, which vLLM renames to one it does not have"
        return reason, _convert(facts, "zlab")
    return None


def _not_for_sglang(facts: Facts) -> tuple[str, str] | None:
    if facts.kind == "speculators":
        return "SGLang does not read nested configs or reduced heads", _convert(facts, "zlab")
    if facts.format == "angelslim":
        return "`architectures` is AngelSlim's, which SGLang does not have", _convert(facts, "zlab")
    return None


def _not_for_speculators(facts: Facts) -> tuple[str, str] | None:
    if facts.kind == "speculators":
        return None
    return "it is not speculators' format", _convert(facts, "speculators")


def _not_for_llama(facts: Facts) -> tuple[str, str] | None:
    if facts.kind == "dflash" and facts.format != "angelslim":
        return None
    return "its converter reads z-lab's format", _convert(facts, "zlab")


_NOT_FOR = {
    "hf-dflash": _not_for_package,
    "transformers": _not_for_transformers,
    "trust_remote_code": _not_for_remote_code,
    "vllm": _not_for_vllm,
    "sglang": _not_for_sglang,
    "speculators": _not_for_speculators,
    "llama.cpp": _not_for_llama,
}


def _convert(facts: Facts, to: str) -> str:
    needs_target = "speculators" in (facts.kind, to)
    target = " --target TARGET" if needs_target else ""
    return f"`hf-dflash convert {facts.path} OUT --to {to}{target}`"


def _commands(facts: Facts, target: str | None) -> dict[str, str]:
    """How each engine is started with the folder, if its config can be read."""
    if facts.config is None:
        return {}
    path = str(facts.path)
    on_card = re.search(r"^base_model:\s*(\S+)\s*$", facts.card, re.MULTILINE)
    name = target or _verifier(facts) or (on_card.group(1) if on_card else "TARGET")
    served = f"vllm serve {path}" if facts.kind == "speculators" else None
    return {
        "vllm": served or vllm_command(facts.config, name, path),
        "sglang": sglang_command(facts.config, name, path),
        "llama.cpp": f"python convert_hf_to_gguf.py {path} --target-model-dir {name}",
    }


def _verifier(facts: Facts) -> str | None:
    section = facts.raw.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, dict) else None
    return verifier.get("name_or_path") if isinstance(verifier, dict) else None


def as_dict(examination: Examination) -> dict[str, Any]:
    """The examination as it is written to JSON."""
    return {
        "path": examination.path,
        "format": examination.format,
        "exit_code": examination.exit_code,
        "engines": {
            verdict.engine: {
                "state": verdict.state,
                "reason": verdict.reason,
                "remedy": verdict.remedy,
                "findings": [
                    {
                        "severity": finding.severity,
                        "subject": finding.subject,
                        "reason": finding.reason,
                        "remedy": finding.remedy,
                    }
                    for finding in verdict.findings
                ],
            }
            for verdict in examination.verdicts
        },
        "commands": examination.commands,
    }
