"""Conversion of a sharded checkpoint into a single file.

python -m engine.checkpoint.consolidate runs/NAME/best best.pt
"""

from pathlib import Path

from engine import UserError, cli, distributed
from engine.checkpoint import format, manifest
from engine.checkpoint.archive import security_warning
from engine.checkpoint.files import BEST, LAST, LAST_FOLDER, NUMBERED


def consolidate(folder: Path, path: Path) -> None:
    """Write the sharded checkpoint in `folder` to the file `path`, as other runs save theirs.

    Raises UserError if it is none, is damaged, or the file cannot be written, or has a name that a
    run with sharded checkpoints removes.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: it is no folder; name a sharded checkpoint, such as step-500")
    is_name = path.name in (LAST, BEST) or NUMBERED.fullmatch(path.name)
    if is_name and manifest.exists(path.with_name(LAST_FOLDER)):
        raise UserError(f"{path}: the run there removes files of this name; name another file")
    if warning := security_warning(folder):
        distributed.print_on_rank_zero(f"warning: {folder}: {warning}")
    entries = format.load(folder)
    del entries["origin"]  # which describes other scripts' checkpoints
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        format.write(path, entries)
    except OSError as error:
        raise UserError(f"{path} can't be written ({error.strerror}); name another file") from None


def main() -> None:
    """Convert the checkpoint that the command line names."""
    description = "Convert a sharded checkpoint into a single file."
    parser = cli.ArgumentParser("python -m engine.checkpoint.consolidate", description=description)
    parser.add_argument("folder", type=Path, help="checkpoint, such as runs/NAME/best")
    parser.add_argument("file", type=Path, help="file to write, such as best.pt")
    args = parser.parse_args()
    consolidate(args.folder, args.file)
    print(f"wrote {args.file}")


if __name__ == "__main__":
    distributed.run(main)
