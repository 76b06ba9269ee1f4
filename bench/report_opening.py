"""How large a report is and how long it takes to open; with --libraries, what that would be with other libraries.

python bench/report_opening.py results/philly/latest/report.html [--times 5]
python bench/report_opening.py --libraries        (those of bokeh, plotly, vl-convert-python that are installed)
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import statistics
import tempfile
import zlib
from importlib.util import find_spec
from pathlib import Path

WIDTHS = (1280, 390)
CHART = """
const lines = [...Array(6).keys()].map((k) => [...Array(400).keys()].map((i) => Math.sin(i / 50 + k)));
const x = [...Array(400).keys()];
"""
DRAW = {
    "bokeh": "for (const id of ['a', 'b']) { const f = Bokeh.Plotting.figure({width: 800, height: 400});"
    " lines.forEach((y) => f.line(x, y)); await Bokeh.Plotting.show(f, '#' + id); }",
    "plotly": "for (const id of ['a', 'b']) await Plotly.newPlot(id, lines.map((y) => ({x, y})));",
    "vega": """const values = lines.flatMap((y, k) => y.map((v, i) => ({i, v, k})));
const [i, v] = ["i", "v"].map((field) => ({field, type: "quantitative"})), color = {field: "k", type: "nominal"};
const chart = {width: 800, height: 400, mark: "line", data: {values}, encoding: {x: i, y: v, color}};
for (const id of ["a", "b"]) await vegaEmbed("#" + id, chart);""",
}


def folder_of(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def script_of(library: str) -> str | None:
    """What would stand in the page; None where the package is not installed."""
    if library == "vega":
        if folder_of("vl_convert") is None:
            return None
        import vl_convert

        return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    folder = folder_of(library)
    paths = {
        "bokeh": ("server/static/js/bokeh.min.js", "server/static/js/bokeh-api.min.js"),
        "plotly": ("package_data/plotly.min.js",),
    }
    return None if folder is None else ";\n".join((folder / each).read_text("utf-8") for each in paths[library])


def page_of(library: str, script: str) -> str:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = base64.b64encode(deflate.compress(script.encode()) + deflate.flush()).decode()
    kind = ' type="module"' if library == "vega" else ""
    return f"""<!DOCTYPE html><meta charset="utf-8"><div id="a"></div><div id="b"></div>
<script type="text/plain" id="packed">{packed}</script><script>(async () => {{
const bytes = Uint8Array.from(atob(document.getElementById("packed").textContent), (each) => each.charCodeAt(0));
const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
const script = document.createElement("script");
script.textContent = await new Response(stream).text();
{"script.type = 'module';" if kind else ""}
document.head.append(script);
{"while (!window.vegaEmbed) await new Promise((go) => setTimeout(go, 1));" if kind else ""}
{CHART}{DRAW[library]}
document.documentElement.dataset.open = document.documentElement.dataset.whole = Math.round(performance.now());
}})();</script>"""


def seconds(context, path: Path) -> tuple[float, float, float]:
    """(until it is interactive, until all is drawn, the page's CPU time) of one opening."""
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Performance.enable")
    page.goto(path.resolve().as_uri())
    page.wait_for_function("document.documentElement.dataset.whole", timeout=120_000)
    opened, whole = page.evaluate("[document.documentElement.dataset.open, document.documentElement.dataset.whole]")
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    page.close()
    return int(opened) / 1000, int(whole) / 1000, metrics["TaskDuration"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("--libraries", action="store_true")
    parser.add_argument("--times", type=int, default=5)
    asked = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        paths = {} if asked.report is None else {asked.report.name: asked.report}
        for library in DRAW if asked.libraries else ():
            if script := script_of(library):
                paths[library] = Path(folder) / f"{library}.html"
                paths[library].write_text(page_of(library, script), encoding="utf-8")
                print(f"{library}: {len(script):,} bytes of script, {paths[library].stat().st_size:,} packed in a page")
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        print(f"{browser.version}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; medians of {asked.times}")
        for name, path in paths.items():
            for width in WIDTHS:
                context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
                found = [seconds(context, path) for _ in range(asked.times)]
                opened, whole, cpu = (statistics.median(each) for each in zip(*found, strict=True))
                print(
                    f"{name} at {width} px: {path.stat().st_size / 1e6:.2f} MB, interactive after {opened:.2f} s, "
                    f"all drawn after {whole:.2f} s, main thread busy {cpu:.2f} s"
                )
                context.close()
        browser.close()


if __name__ == "__main__":
    main()
