"""A link to the glossary leads to a letter: the term must be there, not under another letter."""
import json
import re
from functools import cache

import pytest
from page import ROOT, pages

GLOSSARY = ROOT/'nbs/notes/glossary.ipynb'
LINK = re.compile(r'\[([^\]]+)\]\((?:[./\w]*/)?glossary\.ipynb#(\w)\)')


def words_of(page) -> list[str]:
    cells = json.loads(page.read_text('utf-8'))['cells']
    return [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown']


def stems(text) -> set[str]:
    "The beginnings of its words; of short ones those of abbreviations and numbers."
    words = re.findall(r'[a-zA-Z0-9]+', text)
    named = [word for word in words if len(word) > 3 or not word.islower()]
    return {re.sub(r'(?<=[a-z])\d+$', '', word.lower()[:5]) for word in named}  # FSDP is FSDP2


@cache
def letters() -> dict[str, set[str]]:
    "What the terms of each letter begin with, and their meanings."
    found = {}
    for text in words_of(GLOSSARY):
        head = re.match(r'## (\w)\n', text)
        if not head: continue
        rows = re.findall(r'^\| (\*\*.+) \| \[', text, re.M)
        found[head[1]] = set().union(*map(stems, rows))
    return found


def astray(texts) -> list[tuple]:
    "The links whose words are under no term of their letter; 'glossary' alone means the page."
    links = [link for text in texts for link in LINK.findall(text) if link[0] != 'glossary']
    return [(text, letter) for text, letter in links
            if not stems(text) & letters().get(letter, set())]


@pytest.mark.parametrize('page', pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_to_the_glossary_leads_to_its_term(page):
    assert astray(words_of(page)) == []


def test_a_link_to_another_letter_is_found():
    bad = '[moments](../notes/glossary.ipynb#m) and [recomputed](glossary.ipynb#r)'
    assert astray([bad]) == [('moments', 'm'), ('recomputed', 'r')]
    assert astray([bad.replace('#m', '#o').replace('#r', '#g')]) == []
