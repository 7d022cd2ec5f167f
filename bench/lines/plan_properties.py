"""Properties of the memory plan over 20,000 random recipes; the value counts violations."""
from bench.record import record
from bench.shared.properties import PROPERTIES, judged
from bench.shared.random_recipes import minimal, recipes

SEED = 20261125


def violations(one, examples: int, seed: int) -> tuple[int, list]:
    "Draw recipes; their count, and those of which a property does not hold with what is wrong."
    import hypothesis
    drawn, found = [], []

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=examples, database=None, deadline=None,
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(recipes())
    def judge(recipe):
        drawn.append(1)
        said = judged(recipe, one.broken)
        if said: found.append((recipe, said))

    judge()
    return len(drawn), found


def row(one, examples: int, seed: int) -> dict:
    "One row of the record; where a property is violated, with the plainest recipe that was drawn."
    drawn, found = violations(one, examples, seed)
    made = {'name': one.name, 'recipes': drawn, 'violations': len(found)}
    if not found: return made
    recipe, said = min(found, key=lambda case: len(minimal(case[0])))
    return made | {'least': minimal(recipe), 'said': said}


def measure(examples: int = 20_000, seed: int = SEED) -> dict:
    "Judge each property of its share of the recipes."
    rows = [row(one, -(-examples // len(PROPERTIES)), seed + place)
            for place, one in enumerate(PROPERTIES)]
    return record('plan_properties', [sum(row['violations'] for row in rows)], 'violations',
                  goal=0, seed=seed, recipes=sum(row['recipes'] for row in rows), rows=rows,
                  packages=['hypothesis'])
