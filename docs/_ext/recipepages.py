"""A page per recipe, from its TOML, and the stored results of every preset with their figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import marks

from fedspeed.reproduce.recipes import SUITE, Recipe, minutes_of, recipes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / SUITE


def presets() -> list[str]:
    """Return the presets with stored results."""
    return sorted(path.parent.name for path in RESULTS.glob("*/README.md"))


def pages() -> Iterator[tuple[str, str]]:
    yield "recipes/index.md", index()
    for name, recipe in recipes().items():
        yield f"recipes/{name}.md", page(recipe)


def index() -> str:
    """Return the recipes in order of value, and the results by preset."""
    lines = [
        (f"[`{name}`]({name}.md)", recipe.paper or "ours", marks.cell(recipe.title))
        for name, recipe in recipes().items()
    ]
    stored = [f"- [`{name}`](../results/{name}/index.md)" for name in presets()]
    return "\n".join([
        "# Recipes\n",
        "Every table and figure of the paper, and findings of ours, as data: `fedspeed reproduce NAME --preset PRESET` "
        "makes the runs, prints the paper's numbers beside ours and judges each claim. What came out, in words: "
        "[Reproducing the paper](../explanation/reproduction.md).\n",
        marks.table(("recipe", "of the paper", "what it is"), lines),
        "## Stored results\n", "By preset, the scale they were made at:\n", *stored, "",
        marks.toctree([*recipes(), *(f"../results/{name}/index" for name in presets())], hidden=True),
    ])  # fmt: skip


def page(recipe: Recipe) -> str:
    """Return the page of a recipe: setting, presets, claims, and links to results."""
    name = recipe.name
    done = [preset for preset in presets() if (RESULTS / preset / f"{name}.md").exists()]
    lines = [
        (f"[`{preset}`](../results/{preset}/{name}.md)" if preset in done else f"`{preset}`", str(how.seeds),
         f"{took:.2g}" if (took := minutes_of(recipe, preset)) else "")
        for preset, how in recipe.presets.items()
    ]  # fmt: skip
    parts = [
        f"# {marks.plain(recipe.title)}\n",
        f"{f'{recipe.paper} of the paper' if recipe.paper else 'A finding of ours'}.\n",
    ]
    parts += [f"**Claim.** {marks.plain(' '.join(recipe.claim.split()))}\n"] * bool(recipe.claim.strip())
    parts += [f"**Setting.** {marks.plain(' '.join(recipe.about.split()))}\n"] * bool(recipe.about.strip())
    parts += [f"**Results.** {', '.join(f'[`{preset}`](../results/{preset}/{name}.md)' for preset in done)}.\n"] * bool(
        done
    )
    parts += ["No results of it are stored.\n"] * (not done)
    parts += [
        "## Presets\n",
        "Minutes of the runs that no earlier recipe makes, computed; of `paper` presets on a GPU, else on two cores.\n",
    ]
    parts += [marks.table(("preset", "seeds", "minutes"), lines)]
    parts += ["## What is judged\n", "".join(f"- {marks.plain(claim.text)}\n" for claim in recipe.claims)] * bool(
        recipe.claims
    )
    smallest = "smoke" if "smoke" in recipe.presets else next(iter(recipe.presets))
    parts += ["## Run it\n", marks.block(f"fedspeed reproduce {name} --preset {smallest}", "sh")]
    return "\n".join(parts)


def figures(preset: str, name: str) -> list[Path]:
    """Return the pictures of one recipe's results: NAME.png, or NAME-COLUMN.png."""
    others = [other for other in recipes() if other.startswith(f"{name}-")]
    found = [*RESULTS.glob(f"{preset}/{name}.png"), *sorted(RESULTS.glob(f"{preset}/{name}-*.png"))]
    return [path for path in found if not any(path.name.startswith(other) for other in others)]


def stored() -> Iterator[tuple[Path, str]]:
    """Yield the results' pages: the file, its text with figures and the files that come with it."""
    for preset in presets():
        folder = RESULTS / preset
        own = sorted(path.stem for path in folder.glob("*.md") if path.name != "README.md")
        tree = marks.toctree(own, hidden=True)
        yield folder / "README.md", (folder / "README.md").read_text("utf-8") + f"\n{tree}"
        for name in own:
            path = folder / f"{name}.md"
            files = [folder / f"{name}.{kind}" for kind in ("csv", "tex", "svg")]
            links = [f"[{file.suffix[1:]}]({file.name})" for file in files if file.exists()]
            shown = [f"![{picture.stem}]({picture.name})\n" for picture in figures(preset, name)]
            text = path.read_text("utf-8")
            text += "\n## Figure\n\n" * bool(shown) + "\n".join(shown)
            text += f"\nFiles: {', '.join(links)}.\n" * bool(links)
            text += f"\nThe recipe: {{doc}}`/recipes/{name}`.\n" * (name in recipes())
            yield path, text
