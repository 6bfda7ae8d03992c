"""Write docs/api.md, the API reference, from the docstrings: python docs/write_api.py.

The source is read and not imported, so the page is the same whatever is installed. What is public
stands in `GROUPS`. A test holds the committed page to what this writes.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "src" / "hf_dflash"
#: Longest signature on one line.
LINE_LENGTH = 88

Function: TypeAlias = ast.FunctionDef
#: Modules and their public names; a name with methods behind a colon has these alone shown.
Modules: TypeAlias = dict[str, tuple[str, ...]]

GROUPS: dict[str, tuple[str, Modules]] = {
    "Decode": (
        "A drafter, its config, and what `generate(assistant_model=drafter)` gives. How to use "
        "them: [decoding](decoding.md).",
        {
            "modeling_dflash": (
                "DFlashDraftModel: from_pretrained save_pretrained push_to_hub forward "
                "fuse_context extend_context new_cache",
            ),
            "configuration_dflash": (
                "DFlashConfig: for_target validate_drafter layer_is_causal layer_window",
            ),
            "outputs_dflash": ("DFlashGenerateOutput", "DecodingStatistics"),
            "generation_dflash": ("install_dispatch", "remove_dispatch"),
            "drafting": (
                "DFlashCandidateGenerator: add_context propose get_candidates",
                "DraftingPolicy",
                "Proposal",
            ),
            "context_cache": ("ContextCache",),
            "verification": (
                "verify_greedy",
                "sample_or_accept",
                "residual",
                "Verification",
                "DraftLaw",
            ),
            "smollm2": ("load_target", "target_folder", "demo_drafter_folder"),
        },
    ),
    "Train": (
        "From chats to a drafter. How to use them: [training](training.md); why they are so: "
        "[how it works](how-it-works.md#training-many-blocks-of-one-text).",
        {
            "trainer": ("DFlashTrainer: evaluate gamma_at save_model push_to_hub",),
            "training_arguments": ("DFlashTrainingArguments",),
            "callbacks": ("DecodingCallback: measure", "prompts_of"),
            "chats": ("Chat", "read_chats", "chat_of"),
            "data": ("encode_chats", "ChatRows", "DataReport", "save_rows", "load_rows"),
            "loss_mask": ("ChatEncoder", "EncodedChat", "EncodedRow"),
            "packing": ("pack_rows",),
            "regenerate": ("regenerate_answers", "RegenerationReport"),
            "collator": ("DFlashCollator",),
            "taps_cache": ("plan_cache", "CacheLayout", "write_taps", "CachedTaps"),
            "warm_start": ("init_from_target", "merge_adapter"),
            "blocks": (
                "BlockMaskRule",
                "valid_anchors",
                "draw_anchors",
                "fixed_anchors",
                "block_targets",
                "BlockTargets",
                "block_noise_ids",
                "block_positions",
            ),
            "losses": (
                "decay_weights",
                "progressive_gamma",
                "dpace_weights",
                "chunked_loss",
                "SlotLosses",
                "cross_entropy",
                "forward_kl",
                "total_variation",
                "lk_alpha",
                "lk_lambda",
            ),
            "on_policy": (
                "slot_draws",
                "draft_ids",
                "score_drafts",
                "DraftScores",
                "check_on_policy",
            ),
            "metrics": ("acceptance_metrics",),
        },
    ),
    "Measure": (
        "The file of `hf-dflash bench`, its figures and its report. How to use them: "
        "[measuring](measuring.md).",
        {
            "measurement": ("read_measurement", "write_measurement", "Measurement"),
            "acceptance_counts": ("count_acceptance", "AcceptanceCounts"),
            "measurement_runs": ("Run", "Seconds", "Settings", "Provenance"),
            "measurement_summary": (
                "Summary",
                "MethodSummary",
                "Acceptance",
                "Identity",
                "Difference",
                "Spread",
            ),
            "report": ("write_report", "picture_files"),
        },
    ),
    "Publish": (
        "Cards, the Hub, and other engines' formats. How to use them: [publishing](publishing.md), "
        "[formats](formats.md), [serving](serving.md).",
        {
            "model_card": ("write_card", "CardOptions", "check_card"),
            "hub": ("push_folder", "push_model", "folder_contents", "FolderContents"),
            "convert": ("convert", "Conversion"),
            "doctor": ("examine", "Examination", "Verdict"),
            "serving": ("vllm_command", "sglang_command"),
        },
    ),
}

INTRODUCTION = """# API reference

Written from the docstrings by `python docs/write_api.py`. What is not here may change without
notice. Names in **bold** come from `hf_dflash` itself, the others from their modules; what derives
from a class of transformers has all that the class has, too. Shapes stand first in the text of an
argument, in letters that each module explains.
"""


def exported_names() -> dict[str, str]:
    """Names that `hf_dflash` itself has, and their modules."""
    for node in parsed("__init__").body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOME_OF":
            return dict(ast.literal_eval(node.value))
    raise RuntimeError("`_HOME_OF` must stand in hf_dflash/__init__.py, and does not.")


def parsed(module: str) -> ast.Module:
    """The syntax tree of one of the package's modules."""
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def definition(tree: ast.Module, name: str) -> ast.ClassDef | Function:
    """Find a class or function of a module."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    raise RuntimeError(f"`GROUPS` must hold names that exist, got {name!r}. Correct it.")


def arguments_of(function: Function, *, bound: bool) -> list[str]:
    """Parameters as they stand in the source, `self` or `cls` left out."""
    spec = function.args
    plain = [*spec.posonlyargs, *spec.args]
    n_required = len(plain) - len(spec.defaults)
    shown = [_argument(a, None) for a in plain[:n_required]]
    shown += [_argument(a, d) for a, d in zip(plain[n_required:], spec.defaults, strict=True)]
    shown = shown[1:] if bound else shown
    if spec.vararg:
        shown.append(f"*{_argument(spec.vararg, None)}")
    elif spec.kwonlyargs:
        shown.append("*")
    shown += [_argument(a, d) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    return shown + ([f"**{_argument(spec.kwarg, None)}"] if spec.kwarg else [])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = argument.annotation
    text = argument.arg if kind is None else f"{argument.arg}: {_annotation(kind)}"
    if default is None:
        return text
    return f"{text}{'=' if kind is None else ' = '}{_code(default)}"


def _code(node: ast.expr) -> str:
    """An expression, quoted as the source quotes."""
    return ast.unparse(node).replace("'", '"')


def _annotation(node: ast.expr) -> str:
    """A type as it is meant: quotes around it only serve the interpreter."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node)


def signature(name: str, arguments: list[str], returns: ast.expr | None) -> str:
    """A signature in a fence, a parameter a line if it is long."""
    end = "" if returns is None else f" -> {_annotation(returns)}"
    line = f"{name}({', '.join(arguments)}){end}"
    if len(line) > LINE_LENGTH:
        rows = "".join(f"    {argument},\n" for argument in arguments)
        line = f"{name}(\n{rows}){end}"
    return f"```py\n{line}\n```"


def markdown(docstring: str | None) -> str:
    """A Google docstring as Markdown: paragraphs, lists of arguments, examples."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", docstring or ""):
        lines = paragraph.splitlines()
        if lines and lines[0].startswith(">>>"):
            parts.append("```pycon\n" + "\n".join(lines) + "\n```")
        elif len(lines) > 1 and lines[0].endswith(":") and lines[1].startswith("    "):
            parts.append(_section(lines[0].rstrip(":"), textwrap.dedent("\n".join(lines[1:]))))
        elif all(line.startswith("    ") for line in lines):
            parts.append("```py\n" + textwrap.dedent(paragraph) + "\n```")
        else:
            parts.append(" ".join(line.strip() for line in lines))
    return "\n\n".join(_words(part) for part in parts)


def _section(title: str, body: str) -> str:
    titles = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises", "Attributes": "Fields"}
    title = f"*{titles.get(title, title)}:*"
    if title == "*Returns:*":
        return f"{title} " + " ".join(body.split())
    items = re.split(r"\n(?=\S)", body)
    found = [re.fullmatch(r"(\*{0,2}[\w.]+): (.*)", item, flags=re.DOTALL) for item in items]
    if not all(found):
        return f"{title} " + " ".join(body.split())
    rows = [f"* `{m[1]}`: {' '.join(m[2].split())}" for m in found if m]
    return "\n".join([title, "", *rows])


def _words(text: str) -> str:
    """Sphinx's roles and double backticks as plain code."""
    if text.startswith("```"):
        return text
    text = re.sub(r":\w+:`~?(?:hf_dflash\.\w+\.)?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def fields(node: ast.ClassDef, source: list[str]) -> Iterator[tuple[str, str]]:
    """Fields of a dataclass with what a comment behind each says."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            text = f"{item.target.id}: {_annotation(item.annotation)}{_default(item.value)}"
            _, _, comment = source[(item.end_lineno or item.lineno) - 1].partition("  # ")
            yield text, "" if comment.startswith(("noqa", "type:")) else comment


def _default(value: ast.expr | None) -> str:
    if value is None:
        return ""
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "field":
        given = {keyword.arg: _code(keyword.value) for keyword in value.keywords}
        if "default_factory" in given:
            return f" = {given['default_factory']}()"
        return f" = {given['default']}" if "default" in given else ""
    return f" = {_code(value)}"


def is_dataclass(node: ast.ClassDef) -> bool:
    """Whether fields are what the class is made of."""
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def with_fields(text: str, found: list[tuple[str, str]]) -> str:
    """A dataclass's text with types and defaults, and with the fields it does not explain."""
    rows = []
    for field, why in found:
        said = f"* `{field.partition(':')[0]}`: "
        if said in text:
            text = text.replace(said, f"* `{field}`: ")
        else:
            rows.append(f"* `{field}`{': ' if why else ''}{why}")
    return "\n\n".join([text, "*Fields:*", "\n".join(rows)] if rows else [text])


def methods_of(node: ast.ClassDef, chosen: Iterable[str]) -> list[Function]:
    """Those named, or all public ones that say something."""
    chosen = list(chosen)
    found = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    if chosen:
        return [next(f for f in found if f.name == name) for name in chosen]
    return [f for f in found if not f.name.startswith("_") and ast.get_docstring(f)]


def class_text(node: ast.ClassDef, path: str, chosen: Iterable[str], source: list[str]) -> str:
    """One class: signature or fields, docstring, methods."""
    parts = []
    init = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
    if init:
        parts.append(signature(path, arguments_of(init[0], bound=True), None))
    elif not is_dataclass(node):
        parts.append(signature(path, [], None))
    text = markdown(ast.get_docstring(node))
    parts.append(with_fields(text, list(fields(node, source))) if is_dataclass(node) else text)
    parts += [method_text(node.name, method) for method in methods_of(node, chosen)]
    return "\n\n".join(parts)


def method_text(owner: str, method: Function) -> str:
    """One method, or a property."""
    decorators = {ast.unparse(d) for d in method.decorator_list}
    title = f"##### `{owner}.{method.name}`"
    document = markdown(ast.get_docstring(method))
    if any("property" in name for name in decorators):
        kind = "" if method.returns is None else f" `{_annotation(method.returns)}`."
        return f"{title}\n\nProperty,{kind} {document}"
    arguments = arguments_of(method, bound="staticmethod" not in decorators)
    return f"{title}\n\n{signature(method.name, arguments, method.returns)}\n\n{document}"


def module_text(module: str, names: Iterable[str], exported: dict[str, str]) -> str:
    """All that is public in a module."""
    tree = parsed(module)
    source = (PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines()
    parts = [f"### `hf_dflash.{module}`", markdown(ast.get_docstring(tree))]
    for entry in names:
        name, _, methods = entry.partition(":")
        node = definition(tree, name)
        home = "hf_dflash" if exported.get(name) == module else f"hf_dflash.{module}"
        parts.append(f"#### `{name}`")
        if isinstance(node, ast.ClassDef):
            parts.append(class_text(node, f"{home}.{name}", methods.split(), source))
        else:
            shown = signature(f"{home}.{name}", arguments_of(node, bound=False), node.returns)
            parts.append(f"{shown}\n\n{markdown(ast.get_docstring(node))}")
    return "\n\n".join(parts)


def contents(modules: Modules, exported: dict[str, str]) -> str:
    """A list of a group's names with links, module by module."""
    rows = ["| module | |", "|---|---|"]
    for module, names in modules.items():
        links = []
        for name in (entry.partition(":")[0] for entry in names):
            link = f"[`{name}`](#{name.lower()})"
            links.append(f"**{link}**" if exported.get(name) == module else link)
        rows.append(f"| `{module}` | {', '.join(links)} |")
    return "\n".join(rows)


def page() -> str:
    """The whole page."""
    exported = exported_names()
    links = " · ".join(f"[{group}](#{group.lower()})" for group in GROUPS)
    parts = [INTRODUCTION.strip(), links]
    for group, (introduction, modules) in GROUPS.items():
        parts += [f"## {group}", introduction, contents(modules, exported)]
        parts += [module_text(module, names, exported) for module, names in modules.items()]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (DOCS / "api.md").write_text(page(), encoding="utf-8")
