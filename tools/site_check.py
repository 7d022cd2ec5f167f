"""Check that the site shows what the pages contain.

It looks for lost paragraphs, dead links, links to the published site, raw markup, widgets without a
picture, and pictures without words.
"""
import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

from page import WIDGET, pages

SILENT = {'script', 'style'}  # A reader does not see what is inside these
PICTURES = {'text/html', 'image/png', 'image/svg+xml'}  # They need no kernel
RULES = ('.cell_output pre { white-space: pre-wrap',
         '.cell_output, .table-wrapper { overflow-x: auto')


class Page(HTMLParser):
    "The text, the links and the anchors of one page of the site."

    def __init__(self, text: str):
        super().__init__()
        self.texts = []
        self.links = []
        self.anchors = set()
        self.wordless = 0  # Pictures with nothing to read aloud, or only the name of a file
        self._silent_depth = 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag in SILENT: self._silent_depth += 1
        self.anchors |= {values[key] for key in ('id', 'name') if values.get(key)}
        if tag == 'img' and re.fullmatch(r'\S*\.png|', values.get('alt') or ''): self.wordless += 1
        if tag == 'a' and values.get('href'): self.links.append(values['href'])

    def handle_endtag(self, tag):
        if tag in SILENT: self._silent_depth -= 1

    def handle_data(self, data):
        if not self._silent_depth: self.texts.append(data)


# What a page of the book contains

def letters(text: str) -> str:
    "Give the letters and digits of a text, so that markup and line ends do not count."
    return ''.join(re.findall(r'[^\W_]+', text))


def paragraphs(source: str) -> list[str]:
    "Split the text of a cell into what the site must show: paragraphs, items, cells of tables."
    source = re.sub(r'(?s)```.*?```|<!--.*?-->', '', source)
    source = re.sub(r'(?m)^:::.*$|^\s*\|[-| :]+\|\s*$', '', source)
    source = re.sub(r'!?\[([^]]*)\]\([^)]*\)(\{[^}]*\})?', r'\1', source)  # Only a link's words
    source = re.sub(r'<(https?:[^>]+)>', r'\1', source)
    html = r'(`[^`\n]+`)|</?[a-zA-Z][^>]*>'  # In code it is no HTML, as in `<eos>`
    source = unescape(re.sub(html, lambda found: found[1] or ' ', source))
    parts = re.split(r'\n\s*\n|(?m:^\s*[-*] |^\s*\d+\. |^\s*\|)|\|', source)
    # The site draws formulas, and does not write them
    return [part for part in parts if letters(part) and '$' not in part]


def lost_paragraphs(page: Path, shown: Page) -> list[str]:
    "List the paragraphs of a page that the site does not show."
    site_text = letters(''.join(shown.texts))
    lost = []
    for cell in json.loads(page.read_text(encoding='utf-8'))['cells']:
        if cell['cell_type'] != 'markdown': continue
        for paragraph in paragraphs(''.join(cell['source'])):
            wanted = letters(re.sub(r'[`*#>]', '', paragraph))
            if wanted not in site_text: lost.append(' '.join(paragraph.split())[:90])
    return lost


def bare_widgets(page: Path) -> int:
    "Count the widgets of a page that have no picture for a reader without a kernel."
    cells = json.loads(page.read_text(encoding='utf-8'))['cells']
    outputs = [output.get('data', {}) for cell in cells for output in cell.get('outputs', [])]
    return sum(WIDGET in data and not PICTURES & set(data) for data in outputs)


def faults_of_page(page: Path, name: Path, shown: Page | None) -> list[str]:
    "List what the site does not show of one page of the book."
    if shown is None: return [f'{name}: is not in the site']
    messages = [f'{name}: lost: {paragraph}' for paragraph in lost_paragraphs(page, shown)]
    widgets = bare_widgets(page)
    if widgets: messages.append(f'{name}: {widgets} widgets that no kernel shows')
    return messages


# What a page of the site contains

def dead_links(file: Path, site_pages: dict[Path, Page]) -> list[str]:
    "List the local links of a page that lead to no file, or to no anchor of the file."
    dead = []
    for link in site_pages[file].links:
        address, anchor = urldefrag(link)
        if re.match(r'[a-z]+:', address): continue
        target = (file.parent/unquote(address)).resolve() if address else file
        if anchor and target in site_pages:
            is_dead = unquote(anchor) not in site_pages[target].anchors
        else: is_dead = not target.exists()
        if is_dead: dead.append(link)
    return dead


def raw_markup(page: Page) -> str:
    "Give the first attributes of a picture or a link that a reader sees as text, or ''."
    markup = re.search(r'\{(target=|style=|\.[a-z]|#[a-z])[^}]*\}', ''.join(page.texts))
    if not markup: return ''
    is_known = 'style="float' in markup[0] or 'target=' in markup[0]
    return markup[0] if is_known else ''


def faults_of_site_page(file: Path, name: Path, site_pages: dict[Path, Page],
                        home: str) -> list[str]:
    "List dead links, links to the published site, wordless pictures and raw markup of a page."
    page = site_pages[file]
    unique_links = dict.fromkeys(dead_links(file, site_pages))
    messages = [f'{name}: dead link {link}' for link in unique_links]
    messages += [f'{name}: leaves the site: {link}' for link in page.links if link.startswith(home)]
    if page.wordless: messages.append(f'{name}: {page.wordless} pictures without words')
    markup = raw_markup(page)
    if markup: messages.append(f'{name}: raw markup {markup}')
    return messages


def faults(site: Path, nbs: Path, home: str) -> list[str]:
    "List every place where the site does not show what the pages in `nbs` contain."
    site = site.resolve()
    site_pages = {file.resolve(): Page(file.read_text(encoding='utf-8'))
                  for file in sorted(site.rglob('*.html'))}
    messages = []
    for page in pages():
        name = page.relative_to(nbs)
        file = (site/name).with_suffix('.html')
        messages += faults_of_page(page, name, site_pages.get(file))
    for file in site_pages:
        messages += faults_of_site_page(file, file.relative_to(site), site_pages, home)
    css = ' '.join(file.read_text() for file in site.rglob('custom.css'))
    messages += [f'custom.css lacks {rule}: tables or sentences would be cut'
                 for rule in RULES if rule not in css]
    return messages
