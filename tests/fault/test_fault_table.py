"""Every fault of the table has its test, and the table names the files as they are."""
import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_fault_has_a_test_of_its_number_and_the_table_says_where():
    rows = dict(re.findall(r'^\| (\d+) \|.*\| (.*?) \|$', (HERE/'README.md').read_text(), re.M))
    assert [int(number) for number in rows] == list(range(1, 26))
    for number, named in rows.items():
        pattern = rf'^def test_(?:\d\d_and_)?{int(number):02}_'
        with_a_test = {
            path.name
            for path in HERE.glob('test_*.py')
            if re.search(pattern, path.read_text(), re.M)}
        assert with_a_test == set(re.findall(r'test_\w+\.py', named)), (number, named, with_a_test)
        assert with_a_test, (number, named, with_a_test)
