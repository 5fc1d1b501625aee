"""Write the generated pages, or print those that differ from the source (--check)."""

from __future__ import annotations

import sys

from repository import ROOT

from reference_tables.pages import FOLDER, PAGES


def main() -> int:
    """Write or check all pages; return the exit status."""
    stale = []
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.resolve().relative_to(ROOT)))
            if "--check" not in sys.argv[1:]:
                path.write_text(text)
    print("\n".join(stale) or "all pages are as the source has them")
    return int(bool(stale) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
