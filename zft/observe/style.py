"""The report's style sheet: light and dark by the reader's setting, printable, no outside files."""

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1d1f23;--soft:#62666d;--line:#dfe1e5;--track:#f0f1f3;
--blue:#2f6fde;--orange:#d9730d;--green:#2a8f57;--purple:#8250c8;--red:#cc2f3c;--teal:#138a94;--mark:#d3f2da}
@media(prefers-color-scheme:dark){:root{--bg:#14161a;--card:#1c1f24;--ink:#e7e8ea;--soft:#9aa0a8;--line:#353a42;--track:#262a31;
--blue:#6aa2ff;--orange:#f0a04b;--green:#5cc98a;--purple:#b794f6;--red:#ff7b82;--teal:#4fc4cf;--mark:#1e4d2c}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:64rem;padding:1.5rem 1rem 3rem;color:var(--ink);background:var(--bg)}
h1{font-size:1.5rem;margin:0}h2{font-size:1.15rem;margin:2rem 0 .5rem}p{margin:.4rem 0}
.sub,.none,small,figcaption small{color:var(--soft);font-weight:400}
.lead{font-size:1.1rem;margin:.8rem 0 1rem}
.warn{border-left:4px solid var(--red);background:var(--card);padding:.5rem .8rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.7rem}
.tile,figure,.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.7rem .9rem;margin:0}
.tile b{display:block;font-size:1.35rem;line-height:1.3}.tile span{color:var(--soft);font-size:.85rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr));gap:.7rem}
figcaption{font-weight:600}svg{width:100%;height:auto;display:block;font:12px system-ui,sans-serif;fill:var(--ink)}
.wide{min-width:40rem}.scroll{overflow-x:auto}
.tick{fill:var(--soft)}.grid{stroke:var(--line)}.edge{stroke:var(--soft);stroke-dasharray:3 3}.track{fill:var(--track)}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round}
.s-blue{stroke:var(--blue)}.s-orange{stroke:var(--orange)}.s-green{stroke:var(--green)}.s-faint{stroke:var(--blue);opacity:.35}
circle{stroke:none!important}circle.s-blue{fill:var(--blue)}circle.s-orange{fill:var(--orange)}circle.s-green{fill:var(--green)}
circle.s-faint{fill:var(--blue)}.bad{fill:var(--red)}
.key{white-space:nowrap;font-weight:400;font-size:.85rem;margin-left:.9rem;color:var(--soft)}
.key::before{content:"";display:inline-block;width:.9rem;height:.2rem;margin:0 .3rem .2rem 0;background:currentColor}
.key.s-blue::before,.key.s-faint::before{background:var(--blue)}.key.s-faint{opacity:1}.key.s-faint::before{opacity:.4}
.key.s-orange::before{background:var(--orange)}.key.s-green::before{background:var(--green)}
.lane-compute{fill:var(--blue)}.lane-update{fill:var(--orange)}
.lane-nvme-read{fill:var(--green)}.lane-nvme-write{fill:var(--red)}.lane-h2d{fill:var(--purple)}
.lane-collective{fill:var(--soft)}.lane-d2h{fill:var(--teal)}.lane-idle{fill:none}.longest{font-weight:700;text-decoration:underline}
table{border-collapse:collapse;width:100%}th{font-weight:600;text-align:left;color:var(--soft)}
td,th{padding:.25rem 1rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.facts td:first-child{color:var(--soft);white-space:nowrap}.facts td:last-child{width:100%}
.meter{display:block;height:.7rem;background:var(--blue);border-radius:2px;min-width:1px}.meter.planned{background:var(--line);margin-bottom:2px}
.ok{color:var(--green)}.off{color:var(--red)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;color:var(--soft);margin:.3rem 0;font-size:.9rem}
mark{background:var(--mark);color:var(--ink)}details summary{cursor:pointer;font-weight:600;margin:.6rem 0}
@media print{body{max-width:none}details{display:block}}
"""
