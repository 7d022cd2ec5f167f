"""Does the site say what the pages say? Lost paragraphs, dead links, links that leave, raw markup, widgets without a picture."""
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

from page import pages

SILENT = {'script', 'style'}  # What a reader does not see
WIDGET = 'application/vnd.jupyter.widget-view+json'
RULES = ('.cell_output pre { white-space: pre-wrap', '.cell_output, .table-wrapper { overflow-x: auto')


class Page(HTMLParser):
    "The text, the links and the anchors of one page of the site."

    def __init__(self, text: str):
        super().__init__()
        self.texts, self.links, self.anchors, self._silent = [], [], set(), 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self._silent += tag in SILENT
        self.anchors |= {values[key] for key in ('id', 'name') if values.get(key)}
        if tag == 'a' and values.get('href'): self.links.append(values['href'])

    def handle_endtag(self, tag):
        self._silent -= tag in SILENT

    def handle_data(self, data):
        if not self._silent: self.texts.append(data)


def words(text: str) -> str:
    "Give the letters and digits of a text, so that markup and line ends do not count."
    return ''.join(re.findall(r'[^\W_]+', text))


def paragraphs(source: str) -> list[str]:
    "Split the text of a cell into what must be found on the site: paragraphs, items, cells of tables."
    source = re.sub(r'(?s)```.*?```|<!--.*?-->', '', source)
    source = re.sub(r'(?m)^:::.*$|^\s*\|[-| :]+\|\s*$', '', source)
    source = re.sub(r'!?\[([^]]*)\]\([^)]*\)(\{[^}]*\})?', r'\1', source)  # A link is its words
    source = re.sub(r'<(https?:[^>]+)>', r'\1', source)
    source = re.sub(r'</?[a-zA-Z][^>]*>', ' ', source)  # HTML
    parts = re.split(r'\n\s*\n|(?m:^\s*[-*] |^\s*\d+\. |^\s*\|)|\|', source)
    return [part for part in parts if words(part) and '$' not in part]  # Formulas are drawn, not written


def lost(page: Path, shown: Page) -> list[str]:
    "List the paragraphs of a page that the site does not show."
    text = words(''.join(shown.texts))
    cells = json.loads(page.read_text(encoding='utf-8'))['cells']
    sources = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown']
    return [' '.join(part.split())[:90] for source in sources for part in paragraphs(source)
            if words(re.sub(r'[`*#>]', '', part)) not in text]


def dead(site: Path, where: Path, shown: dict[Path, Page]) -> list[str]:
    "List the local links of a page that lead to no file, or to no anchor of it."
    found = []
    for link in shown[where].links:
        target, anchor = urldefrag(link)
        if re.match(r'[a-z]+:', target): continue
        file = (where.parent/unquote(target)).resolve() if target else where
        if not file.exists(): found.append(link)
        elif anchor and file in shown and unquote(anchor) not in shown[file].anchors: found.append(link)
    return found


def bare_widgets(page: Path) -> int:
    "Count the outputs of a page that are a widget and nothing that a page without a kernel could show."
    cells = json.loads(page.read_text(encoding='utf-8'))['cells']
    outputs = [output.get('data', {}) for cell in cells for output in cell.get('outputs', [])]
    return sum(WIDGET in data and not {'text/html', 'image/png', 'image/svg+xml'} & set(data) for data in outputs)


def faults(site: Path, nbs: Path, home: str) -> list[str]:
    "List every place where the site does not say what the pages in `nbs` say."
    site = site.resolve()
    shown = {file.resolve(): Page(file.read_text(encoding='utf-8')) for file in sorted(site.rglob('*.html'))}
    found = []
    for page in pages():
        name = page.relative_to(nbs)
        file = (site/name).with_suffix('.html')
        if file not in shown:
            found.append(f'{name}: is not in the site')
            continue
        found += [f'{name}: lost: {part}' for part in lost(page, shown[file])]
        if count := bare_widgets(page): found.append(f'{name}: {count} widgets that no kernel shows')
    for file, page in shown.items():
        name = file.relative_to(site)
        found += [f'{name}: dead link {link}' for link in dict.fromkeys(dead(site, file, shown))]
        found += [f'{name}: leaves the site: {link}' for link in page.links if link.startswith(home)]
        if markup := re.search(r'\{(target=|style=|\.[a-z]|#[a-z])[^}]*\}', ''.join(page.texts)):
            if 'style="float' in markup[0] or 'target=' in markup[0]: found.append(f'{name}: raw markup {markup[0]}')
    css = ' '.join(file.read_text() for file in site.rglob('custom.css'))
    found += [f'custom.css lacks {rule}: tables or sentences would be cut' for rule in RULES if rule not in css]
    return found
