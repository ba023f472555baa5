"""The looks of a report page: one column for text, figures as wide as the page, light and dark, no fonts to load."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fcfbf8; --card: #ffffff; --ink: #1d1c1a; --muted: #6a6862; --rule: #e2dfd7; --wash: #f4f1ea;
  --accent: #8a3b12; --wrong: #a63d00; --wrong-wash: #fbe6d8;
  --s0: #63625e; --s1: #0069a8; --s2: #c24d00; --s3: #0d7f60; --s4: #9a4a86; --s5: #8a6a00; --s6: #3d8fc0; --s7: #33322f;
  --serif: "Iowan Old Style", "Palatino Linotype", Palatino, "URW Palladio L", P052, "Source Serif 4", Georgia, serif;
  --sans: "Inter", "Helvetica Neue", "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", Arial, sans-serif;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15161a; --card: #1b1d22; --ink: #e9e6df; --muted: #a09d95; --rule: #33353c; --wash: #202229;
    --accent: #f0a878; --wrong: #ffb27d; --wrong-wash: #4a2a16;
    --s0: #b9b6ae; --s1: #66b8f2; --s2: #ff9350; --s3: #4cc9a0; --s4: #e29bcb; --s5: #dcbb45; --s6: #9fd3f2; --s7: #e4e2dc;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: clamp(1.2rem, 4vw, 4rem) clamp(1rem, 4vw, 3rem); max-width: 76rem;
  background: var(--page); color: var(--ink); font: 1.0625rem/1.6 var(--serif); overflow-wrap: break-word;
  font-variant-numeric: oldstyle-nums; text-rendering: optimizeLegibility;
}
header { max-width: 48rem; margin-bottom: 2.2rem; }
h1 { margin: 0 0 .5rem; font-size: clamp(1.9rem, 5vw, 3rem); line-height: 1.12; font-weight: 500; letter-spacing: -.012em;
  text-wrap: balance; }
.kicker, .sub { margin: 0; font: .82rem/1.5 var(--sans); color: var(--muted); }
.kicker { margin-bottom: .7rem; letter-spacing: .09em; text-transform: uppercase; color: var(--accent); }
.sub { margin-bottom: 1.4rem; font-size: .9rem; }
.lead { margin: 0 0 .9rem; font-size: clamp(1.0625rem, 1.6vw, 1.2rem); text-wrap: pretty; hanging-punctuation: first; }
.detail { margin: 0; text-wrap: pretty; }
section { margin-top: 3.4rem; border-top: 1px solid var(--rule); padding-top: 1.1rem; }
h2 { margin: 0 0 .4rem; font-size: 1.5rem; line-height: 1.25; font-weight: 500; }
section > p { max-width: 44rem; margin: 0 0 1rem; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font: .86rem/1.7 var(--sans); }
a { color: inherit; text-decoration: underline; text-decoration-color: var(--rule); text-underline-offset: .2em; }
a:hover { text-decoration-color: currentColor; }
:focus-visible { outline: 2px solid var(--s1); outline-offset: 3px; }
.complaints { margin: 1.6rem 0 0; padding: .8rem 1.1rem; border-left: 3px solid var(--wrong); background: var(--wrong-wash); }
.complaints p { margin: 0 0 .3rem; font-weight: 600; overflow-wrap: anywhere; }
.complaints ul { margin: 0; padding-left: 1.1rem; font: .86rem/1.55 var(--sans); overflow-wrap: anywhere; }

figure { margin: 1.6rem 0 0; min-width: 0; }
figcaption { max-width: 50rem; margin-top: .8rem; font: .88rem/1.55 var(--sans); color: var(--muted); }
figcaption strong { color: var(--ink); font-weight: 600; }
.table figcaption { margin: 0 0 .7rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 1.6rem 2.4rem;
  align-items: end; }
.panels.even { grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.panels > div { max-width: 31rem; min-width: 0; }
.panels svg { display: block; width: 100%; height: auto; overflow: visible; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; margin: 0 0 1rem; padding: 0; list-style: none;
  font: .88rem/1.5 var(--sans); }
.legend li { display: flex; align-items: center; gap: .55rem; }
.legend svg { width: 34px; height: 12px; flex: none; stroke: var(--c); fill: var(--c); overflow: visible; }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); }
.s4 { --c: var(--s4); } .s5 { --c: var(--s5); } .s6 { --c: var(--s6); } .s7 { --c: var(--s7); }
.swatch { display: inline-block; width: .62em; height: .62em; margin-right: .45em; border-radius: 50%; background: var(--c); }
small { color: var(--muted); font-size: .8em; font-weight: 400; }

.scroll { overflow-x: auto; max-width: 100%; scrollbar-width: thin; }
table { border-collapse: collapse; font: .92rem/1.4 var(--sans); font-variant-numeric: tabular-nums lining-nums; }
.numbers, .words { width: 100%; border-top: 1.5px solid var(--ink); border-bottom: 1.5px solid var(--ink); }
.numbers th, .numbers td, .words th, .words td { padding: .5rem .8rem; vertical-align: baseline; text-align: left;
  font-weight: 400; }
.numbers thead th, .words thead th { border-bottom: 1px solid var(--muted); font-weight: 600; vertical-align: bottom; }
.numbers th:first-child, .words th:first-child { padding-left: 0; }
.numbers tbody tr + tr :is(th, td), .words tbody tr + tr :is(th, td) { border-top: 1px solid var(--rule); }
.numbers small, .words th small { display: block; line-height: 1.35; }
.numbers td small, .title { white-space: nowrap; }
.numbers .heading th { padding-top: 1.1rem; font-weight: 600; }
.numbers .heading span { position: sticky; left: 0; }
.pair { display: flex; flex-wrap: wrap; gap: .1rem 1rem; align-items: baseline; }
.ours { min-width: 5.2em; }
.paper { color: var(--accent); font: italic .95em/1.4 var(--serif); font-variant-numeric: lining-nums tabular-nums; }
.paper span { font-size: .82em; opacity: .85; }
b { font-weight: 700; }
.words td { font-size: .86rem; overflow-wrap: anywhere; min-width: 4.5rem; }
.words td:last-child { min-width: 16rem; }

img { image-rendering: pixelated; display: block; }
.strip { width: 100%; font-size: .74rem; text-align: center; }
.strip th, .strip td { padding: .16rem .08rem; font-weight: 400; white-space: nowrap; }
.strip th[scope=row] { position: sticky; left: 0; z-index: 1; padding-right: .8rem; text-align: left;
  background: var(--page); font-size: .82rem; }
.strip thead :is(th, td) { color: var(--muted); }
.strip img { width: 100%; min-width: 2.5rem; max-width: 4rem; height: auto; margin: 0 auto; }
.strip .count { padding-left: .8rem; text-align: left; font-size: .82rem; }
.strip .wrong, .perturbed .wrong { color: var(--wrong); font-weight: 600; }
.strip .wrong { background: var(--wrong-wash); box-shadow: inset 0 0 0 1px var(--page); }
.strip .right, .perturbed .right { color: var(--muted); }
.scroll + .scroll { margin-top: 1.6rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: 1.6rem 2.4rem; }
.perturbed { width: 100%; max-width: 26rem; table-layout: fixed; font-size: .76rem; text-align: center; }
.perturbed caption { padding-bottom: .3rem; text-align: left; font-size: .86rem; font-weight: 600; }
.perturbed th { padding: .15rem .1rem; font-weight: 400; color: var(--muted); vertical-align: bottom; line-height: 1.25; }
.perturbed th[colspan] { padding: .5rem .15rem .1rem; text-align: left; font-size: .84rem; color: var(--ink); }
.perturbed td { padding: .1rem .15rem; vertical-align: top; }
.perturbed img { width: 100%; height: auto; }
.spheres { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 15rem), 1fr)); gap: 1.6rem 2.4rem; }
.spheres > div { max-width: 22rem; }
.spheres p { margin: .5rem 0 0; font: .88rem/1.4 var(--sans); }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); gap: 4px; }
.tiles img { width: 100%; height: auto; }
.source { outline: 2px solid var(--s2); outline-offset: 0; }
details { margin-top: 1rem; }
summary { cursor: pointer; font: .9rem/1.6 var(--sans); }
footer { margin-top: 4rem; padding-top: 1rem; border-top: 1px solid var(--rule); font: .84rem/1.6 var(--sans);
  color: var(--muted); }

@media (max-width: 40rem) {
  .numbers { font-size: .84rem; }
  .numbers th, .numbers td { padding: .45rem .35rem; }
  .words { display: block; border-bottom: 0; }
  .words thead { display: none; }
  .words tbody, .words tr, .words td, .words th { display: block; }
  .words tbody tr { padding: .6rem 0; border-bottom: 1px solid var(--rule); }
  .words tbody tr :is(th, td) { padding: .05rem 0; border: 0 !important; min-width: 0; }
  .words tbody th { font-weight: 600; }
  .words td::before { content: attr(data-head) ": "; color: var(--muted); }
}
@media print { .scroll { overflow: visible; } section { break-inside: avoid-page; } }
"""
