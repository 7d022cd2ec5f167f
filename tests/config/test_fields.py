"""What the package says of each field of a recipe."""
import json

import pytest

from llm_workbook.__main__ import main
from llm_workbook.config.fields import recipe_fields
from llm_workbook.config.recipe import Recipe

NOTES = recipe_fields()


@pytest.mark.parametrize('note', NOTES, ids=lambda note: note.path)
def test_every_field_says_what_it_means_and_takes(note):
    assert len(note.meaning) > 5, 'write a comment beside the field'
    assert not note.meaning.startswith('The same')  # It is read alone
    assert note.values
    assert note.needed or note.path in str(note)


def test_all_fields_of_a_recipe_are_there_with_the_defaults_that_hold():
    recipe = Recipe(name='plain', model={'source': 'tiny-base'}, data={'source': 'a.jsonl'})
    facts = recipe.facts()
    derived = {'cluster.ranks', 'batch.global', 'data.classes', 'data.misfit', 'zero.set'}
    notes = {note.path: note for note in NOTES if not note.path.startswith('data.mix.')}
    assert notes.keys() == facts.keys() - derived
    written = {'name', 'model.source', 'data.source'}
    assert all(notes[path].default == facts[path] for path in notes.keys() - written)


def test_the_command_says_it_in_words_and_as_json(capsys):
    assert main(['fields', 'method.keep_inputs']) == 0
    assert 'Packed layers keep what they read' in capsys.readouterr().out
    assert main(['fields', 'batch', '--json']) == 0
    notes = json.loads(capsys.readouterr().out)
    assert [note['path'] for note in notes][:2] == ['batch.micro', 'batch.accumulation']
    assert main(['fields', '--json']) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(NOTES)
    with pytest.raises(ValueError, match="did you mean 'clip'"): main(['fields', 'clp'])
