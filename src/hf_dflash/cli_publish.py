"""The commands that publish: `card`, `report` and `push`."""

from pathlib import Path
from typing import Annotated

import typer

from .cli_errors import bad_input_is_one_line

Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Of the drafter; or of a training run.")
]


def card(
    folder: Folder,
    bench: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.json",
            help="Measurement of `hf-dflash bench`; may be given several times. Copied to "
            "FOLDER/evaluation/. Without it, those that are there already.",
        ),
    ] = None,
    *,
    training_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="By default FOLDER/training_log.json, if there is one."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="REPO_ID",
            help="What readers load it by; by default as before, or what `push` will send it to.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="REPO_ID",
            help="The target's repository; by default as it was measured, or as before.",
        ),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="As the Hub writes it, such as apache-2.0."),
    ] = None,
    notes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.md",
            help="Text of your own to be put in, without figures of speed; by default as before.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a card that is not of this generator.")
    ] = False,
    code: Annotated[
        bool,
        typer.Option(
            "--code/--no-code",
            help="Tell how to load it with transformers alone, by the code that a push adds.",
        ),
    ] = True,
) -> None:
    """Write the model card of a drafter (FOLDER/README.md) from what was measured.

    Every figure comes from a file that is published with the card; nothing else is claimed.

    Example: `hf-dflash card my-drafter --bench results.json --name me/my-drafter`
    """
    with bad_input_is_one_line():
        from .model_card import CardOptions
        from .publish_commands import run_card

        options = CardOptions(name, target, licence, overwrite=overwrite, code=code)
        run_card(folder, bench or [], training_log, notes, options)


def report(
    bench: Annotated[
        Path, typer.Argument(metavar="RESULTS.json", help="Measurement of `hf-dflash bench`.")
    ],
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE.html", help="The page to write.")
    ] = Path("report.html"),
    pictures: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the pictures there, too, as SVG and PNG."),
    ] = None,
) -> None:
    """Show a measurement as one HTML page: figures, pictures, and how every token came.

    The page asks for nothing outside itself. Needs matplotlib: `pip install 'hf-dflash[plot]'`.

    Example: `hf-dflash report results.json -o report.html`
    """
    with bad_input_is_one_line():
        from .report_command import run_report

        run_report(bench, out, pictures)


def push(
    folder: Folder,
    repo_id: Annotated[
        str,
        typer.Argument(
            metavar="REPO_ID", help="me/my-drafter; made if it is not there. Needs `hf auth login`."
        ),
    ],
    *,
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public", help="Of a new repository; by default as your account has it."
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(metavar="BRANCH", help="Made if it is not there; the main one by default."),
    ] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Propose the files as a pull request.")
    ] = False,
    commit_message: Annotated[
        str | None, typer.Option(metavar="TEXT", help="By default: Upload drafter.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List the files, show the card, send nothing."),
    ] = False,
    code: Annotated[
        bool,
        typer.Option(
            "--code/--no-code",
            help="Send the code with which AutoModel loads it (trust_remote_code=True), and name "
            "it in config.json. A folder without any gets this package's; weights do not change.",
        ),
    ] = True,
) -> None:
    """Publish a drafter on the Hugging Face Hub: its files and no others, in one commit.

    Refused is a drafter that does not load strictly, and a card with a figure that no measurement
    beside it gives. A push that broke off goes on where it stopped when it is run again.

    Example: `hf-dflash push my-drafter me/my-drafter --dry-run`
    """
    with bad_input_is_one_line():
        from .publish_commands import run_push

        run_push(
            folder,
            repo_id,
            private=private,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
            dry_run=dry_run,
            code=code,
        )
