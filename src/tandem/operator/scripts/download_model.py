"""Downloads a model from the Hugging Face Hub into a folder; run before the engine starts.

The token, if there is one, is in HF_TOKEN. What is there already is not downloaded again.
"""

from __future__ import annotations

import argparse
import importlib
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="ORGANISATION/NAME")
    parser.add_argument("folder")
    parser.add_argument("--revision", help="commit; the newest of main when it is left out")
    parser.add_argument("--ignore", default="", help="patterns of files not wanted, separated by commas")
    given = parser.parse_args()
    hub = importlib.import_module("huggingface_hub")  # of the engine's image
    try:
        hub.snapshot_download(
            given.model,
            revision=given.revision,
            local_dir=given.folder,
            ignore_patterns=given.ignore.split(",") if given.ignore else None,
        )
    except Exception as error:  # each of the Hub's, HTTP's and the disk's own: said in one line
        print(f"HuggingFaceDownloadFailed: {given.model}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
