"""Looks and behaviour of a report's page: all of it lies in the page itself."""

CSS = """\
:root {
  color-scheme: light dark;
  --paper: #ffffff; --panel: #f4f6f8; --ink: #1c2024; --soft: #5a6470; --line: #d9dee3;
  --accepted: #cdebd3; --accepted-edge: #2f8f4e; --bonus: #ffe1b3; --bonus-edge: #b86e00;
  --first: #dfe4ea; --good: #1f7a3d; --bad: #b3372c; --accent: #0b6bcb;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --panel: #1d2226; --ink: #e6e9ec; --soft: #9fabb7; --line: #343b42;
    --accepted: #1f4a2d; --accepted-edge: #5cc27e; --bonus: #573b10; --bonus-edge: #e5a349;
    --first: #333b43; --good: #6fd08f; --bad: #ff8a7d; --accent: #6cb2ff;
    --c1c2024: #e6e9ec; --cc3c8ce: #4a535c; --c0b6bcb: #58a6f5; --c7d858e: #98a2ad;
    --c3f9fb5: #5cc4dc; --cc77700: #e9a23b; --ca8479a: #d37fc6; --cb9a44c: #d8c46c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 1.35rem; line-height: 1.3; margin: 0 0 14px; color: var(--soft); font-weight: 600; }
h2 { font-size: 1.2rem; margin: 44px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 6px; }
p { margin: 0 0 12px; max-width: 75ch; }
code, pre { font: 0.86em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.lead {
  font-size: 1.5rem; line-height: 1.35; font-weight: 600; max-width: 46ch; margin-bottom: 10px;
}
.soft { color: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); }
.tiles { display: grid; gap: 12px; margin: 22px 0 8px;
  grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); }
.tile { background: var(--panel); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 1.7rem; line-height: 1.2; }
.tile span { color: var(--soft); font-size: 0.9rem; line-height: 1.35; display: block; }
.pictures { display: grid; gap: 32px 28px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
figure { margin: 0; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 0.9rem; line-height: 1.45; margin-top: 4px; }
table + p { margin-top: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 10px; border-bottom: 1px solid var(--line); text-align: right; }
th { font-weight: 600; color: var(--soft); font-size: 0.88rem; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tr.main td { font-weight: 600; }
table.facts td { text-align: left; vertical-align: top; overflow-wrap: anywhere; }
table.facts td:first-child { color: var(--soft); white-space: nowrap; }
details { border: 1px solid var(--line); border-radius: 10px; margin: 10px 0; }
summary { cursor: pointer; padding: 10px 14px; }
summary b { font-weight: 600; }
details > div { padding: 0 14px 14px; }
.prompt {
  white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); border-radius: 8px;
  padding: 10px 12px; margin: 0 0 12px; max-width: none; font-size: 0.93rem;
}
.tokens {
  white-space: pre-wrap; overflow-wrap: anywhere; line-height: 2;
  font: 0.92rem/2 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
}
.t { padding: 2px 0; border-bottom: 2px solid transparent; }
.first { background: var(--first); }
.accepted { background: var(--accepted); border-bottom-color: var(--accepted-edge); }
.bonus { background: var(--bonus); border-bottom-color: var(--bonus-edge); }
.start { border-left: 2px solid var(--soft); border-top-left-radius: 3px; margin-left: 1px; }
.instead { border-bottom-style: dotted; cursor: help; }
.t:focus-visible, .t.on { outline: 2px solid var(--accent); outline-offset: 1px; }
.newline { color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; margin: 0 0 12px; font-size: 0.93rem; }
.said {
  position: sticky; bottom: 0; background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; padding: 8px 12px; margin-top: 12px; font-size: 0.93rem; min-height: 2.6em;
  overflow-wrap: anywhere;
}
@media (max-width: 700px) {
  main { padding: 20px 16px 48px; }
  .lead { font-size: 1.25rem; }
  .tiles { grid-template-columns: repeat(2, 1fr); }
  .tile { padding: 10px 12px; } .tile b { font-size: 1.35rem; }
  figure { max-width: 480px; }
  td.empty { display: none !important; }
  table.wide thead { display: none; }
  table.wide tr { display: block; border-bottom: 1px solid var(--line); padding: 8px 0; }
  table.wide td:not(.empty) { display: flex; justify-content: space-between; gap: 16px; border: 0;
    padding: 2px 0; text-align: right; }
  table.wide td:first-child { font-weight: 600; }
  table.wide td:not(:first-child)::before { content: attr(data-label); color: var(--soft);
    font-weight: 400; text-align: left; }
  table.facts td { display: block; padding: 2px 0 8px; }
  table.facts td:first-child { padding: 8px 0 0; border: 0; }
}
@media print { details { break-inside: avoid; } .said { display: none; } }
"""

#: Shows what a token's `data-said` says below its text: on hover, focus and tap.
SCRIPT = """\
for (const box of document.querySelectorAll(".view")) {
  const said = box.querySelector(".said"), usual = said.textContent;
  let on = null;
  const show = (token) => {
    if (on) on.classList.remove("on");
    on = token;
    if (token) token.classList.add("on");
    said.textContent = token ? token.dataset.said : usual;
  };
  for (const event of ["mouseover", "focusin", "click"])
    box.addEventListener(event, (e) => show(e.target.closest("[data-said]")));
  box.addEventListener("mouseleave", () => show(null));
}
"""
