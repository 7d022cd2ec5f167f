"""Write the Grafana dashboard that the package ships, with Grafana's own foundation SDK.

Usage: dashboard.py
"""
import json
from itertools import count
from pathlib import Path

from grafana_foundation_sdk.builders import common, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard, DatasourceVariable, QueryVariable, Row, ThresholdsConfig)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode, BigValueTextMode, GraphDrawStyle, LegendDisplayMode, LegendPlacement,
    StackingMode, TooltipDisplayMode, VisibilityMode)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync, DataSourceRef, DataTransformerConfig, DynamicConfigValue, Threshold,
    ThresholdsMode, VariableRefresh, VariableSort)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FILE = Path(__file__).resolve().parents[1]/'llm_workbook/assets/grafana-dashboard.json'
SOURCE = DataSourceRef(type_val='prometheus', uid='${datasource}')
CHOSEN = 'job=~"$job", instance=~"$instance", run=~"$run"'
GPUS = 'job=~"$gpu_job"'  # An exporter of the cluster has a job of its own
# Of `llmw_memory_bytes`, what is not a part of the others
TOTALS = 'allocated|peak|reserved'


def of(metric: str, *conditions: str) -> str:
    "Write a metric of the chosen runs, or of the GPUs, in PromQL."
    chosen = GPUS if metric.startswith('DCGM_') else CHOSEN
    return f'{metric}{{{", ".join([chosen, *conditions])}}}'


# Variables

def variable(name: str, label: str, query: str) -> QueryVariable:
    "Make a variable whose values Prometheus knows; all of them are chosen at first."
    return (
        QueryVariable(name).label(label).datasource(SOURCE).query(query)
        .multi(True).include_all(True).all_value('.+')
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC))


def variables() -> list:
    "Make all variables; each asks only for what those before it have chosen."
    gpu_util = 'DCGM_FI_DEV_GPU_UTIL'
    return [
        DatasourceVariable('datasource').label('Data source').type('prometheus'),
        variable('job', 'Job', 'label_values(llmw_step, job)'),
        variable('instance', 'Instance', 'label_values(llmw_step{job=~"$job"}, instance)'),
        variable('run', 'Run',
                 'label_values(llmw_step{job=~"$job", instance=~"$instance"}, run)'),
        variable('gpu_job', 'Job of the GPUs', f'label_values({gpu_util}, job)')]


# Panels

numbers = count(1)


def query(expression: str, legend: str, letter: str = 'A') -> prometheus.Dataquery:
    "Make a question to Prometheus, asked for every moment of the picture."
    return (prometheus.Dataquery().ref_id(letter).datasource(SOURCE).expr(expression)
            .legend_format(legend).range())


def common_parts(panel, title: str, description: str, unit: str):
    "Give a panel what every panel has."
    return (panel.id(next(numbers)).title(title).description(description).unit(unit)
            .datasource(SOURCE))


def curve(title: str, description: str, unit: str, *queries: tuple[str, str], span: int = 8):
    "Make a panel of curves over time, from pairs of expression and legend."
    legend = (common.VizLegendOptions().display_mode(LegendDisplayMode.LIST)
              .placement(LegendPlacement.BOTTOM).show_legend(True).calcs([]))
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)
    panel = common_parts(timeseries.Panel(), title, description, unit)
    panel = (panel.height(8).span(span).legend(legend).tooltip(tooltip).line_width(1)
             .draw_style(GraphDrawStyle.LINE).show_points(VisibilityMode.NEVER))
    for letter, (expression, words) in zip('ABCDEF', queries):
        panel = panel.with_target(query(expression, words, letter))
    return panel


def stacked(panel: timeseries.Panel) -> timeseries.Panel:
    "Let the curves of a panel lie on each other."
    stack = common.StackingConfig().mode(StackingMode.NORMAL).group('A')
    return panel.stacking(stack).fill_opacity(60)


def figure(title: str, description: str, unit: str, expression: str, legend: str = '{{run}}'):
    """Make a panel of one figure for each run.

    It asks for now alone: a curve would also show the stages of an hour ago.
    """
    reduced = common.ReduceDataOptions().calcs(['lastNotNull']).fields('').values(False)
    panel = common_parts(stat.Panel(), title, description, unit)
    return (panel.height(4).span(4).reduce_options(reduced).graph_mode(BigValueGraphMode.NONE)
            .with_target(query(expression, legend).instant()))


def steps_of_colour(*pairs: tuple[float | None, str]) -> ThresholdsConfig:
    "Make thresholds from pairs of the least value and its colour; the first has no least value."
    steps = [Threshold(value=value, color=colour) for value, colour in pairs]
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def run_panels() -> list:
    "Make the figures of a run."
    step, steps = of('llmw_step'), of('llmw_steps')
    left = f'max by (run) ({steps}) - max by (run) ({step})'
    pace = f'max by (run) (avg_over_time({of("llmw_step_seconds")}[$__rate_interval]))'
    age = f'time() - max by (run) ({of("llmw_last_step_timestamp_seconds")})'
    stage = f'max by (run, stage) ({of("llmw_stage")}) == 1'
    return [
        figure('Stage', 'What the run does now, as it says itself; a killed run says what it '
               'did last, and the age of its last step tells.', 'none', stage,
               '{{run}}: {{stage}}').text_mode(BigValueTextMode.NAME),
        figure('Last step', 'Seconds since the last step of any rank ended. A run that is '
               'killed or hangs is seen here first.', 's', age).thresholds(
            steps_of_colour((None, 'green'), (120, 'orange'), (1200, 'red'))),
        figure('Steps done', 'Optimizer steps of the recipe that are done.', 'percentunit',
               f'max by (run) ({step}) / max by (run) ({steps})').min(0).max(1),
        figure('Time left', 'Steps that are left, at the mean pace of the last minutes.', 's',
               f'({left}) * {pace}'),
        figure('Loss', 'Loss of the last step, over all ranks.', 'none',
               f'max by (run) ({of("llmw_loss")})').decimals(3),
        figure('Ranks', 'Ranks that have written a step.', 'none',
               f'count by (run) ({step})')]


def learning_panels() -> list:
    "Make the curves of loss, learning rate and gradient norm."
    def by_run(metric): return f'max by (run) ({of(metric)})', '{{run}}'
    return [
        curve('Loss', 'Mean over the tokens of all ranks that are trained on.', 'none',
              by_run('llmw_loss')),
        curve('Learning rate', 'Of the last step.', 'sci', by_run('llmw_learning_rate')),
        curve('Gradient norm', 'Of all gradients of all ranks, before it is clipped.', 'none',
              by_run('llmw_gradient_norm'))]


def speed_panels() -> list:
    "Make the curves of throughput, utilisation and the parts of a step."
    tokens = f'sum by (run) ({of("llmw_tokens_per_second")})'
    all_tokens = f'sum by (run) (rate({of("llmw_tokens_total")}[$__rate_interval]))'
    mfu = f'avg by (run) ({of("llmw_mfu_ratio")})'
    hfu = f'avg by (run) ({of("llmw_hfu_ratio")})'
    phases = f'avg by (run, phase) ({of("llmw_phase_seconds")})'
    messages = of('llmw_phase_seconds', 'phase="communication"')
    return [
        curve('Throughput', 'Useful tokens of all ranks: padding is not counted. The second '
              'curve also counts the time of saving and evaluating.', 'short',
              (tokens, '{{run}}: in a step'), (all_tokens, '{{run}}: all in all')),
        curve('MFU and HFU', 'Share of the peak of the hardware: MFU counts what the model '
              'needs, HFU also what is computed again. Without a known peak there is none.',
              'percentunit', (mfu, '{{run}}: MFU'), (hfu, '{{run}}: HFU')),
        stacked(curve('Parts of a step', 'Seconds of a step by phase, mean over the ranks.', 's',
                      (phases, '{{run}}: {{phase}}'))),
        curve('Step by rank', 'Seconds of the last step of each rank.', 's',
              (f'max by (run, rank) ({of("llmw_step_seconds")})', '{{run}}: rank {{rank}}'),
              span=12),
        curve('Communication by rank', 'Seconds in collectives. The rank that waits least is '
              'the one that the others wait for.', 's',
              (f'max by (run, rank) ({messages})', '{{run}}: rank {{rank}}'), span=12)]


def memory_panels() -> list:
    "Make the curves of memory: by class against the plan, and of the host."
    parts = of('llmw_memory_bytes', f'class!~"{TOTALS}"')
    planned = of('llmw_planned_memory_bytes', f'class!~"{TOTALS}"')
    peaks = [of(metric, 'class="peak"')
             for metric in ('llmw_planned_memory_bytes', 'llmw_memory_bytes')]
    share = f'max by (run, class) ({parts}) / max by (run, class) ({planned} > 0)'
    by_class = stacked(curve(
        'Memory by class', 'Bytes of the fullest rank by class, as a stack. The dashed lines '
        'are the fullest moment of a step in the plan, and the most that was in use: of a GPU, '
        'for a CPU does not count that.', 'bytes',
        (f'max by (run, class) ({parts})', '{{run}}: {{class}}'),
        (f'max by (run) ({peaks[0]})', '{{run}}: planned peak'),
        (f'max by (run) ({peaks[1]})', '{{run}}: measured peak'), span=12))
    line = [
        DynamicConfigValue('custom.stacking', {'mode': 'none', 'group': 'A'}),
        DynamicConfigValue('custom.fillOpacity', 0), DynamicConfigValue('custom.lineWidth', 2),
        DynamicConfigValue('custom.lineStyle', {'fill': 'dash', 'dash': [10, 10]})]
    return [
        by_class.override_by_regexp('/ peak$/', line),
        curve('Share of the plan', 'Bytes of each class of the fullest rank, as a share of what '
              'the plan says. Much more than 100 % is worth a look.', 'percentunit',
              (share, '{{run}}: {{class}}'), span=12),
        curve('Memory of the ranks', 'What is known of each rank, all classes together.',
              'bytes', (f'sum by (run, rank) ({parts})', '{{run}}: rank {{rank}}')),
        curve('Resident memory', 'Of the process of each rank, on its host.', 'bytes',
              (f'max by (run, rank) ({of("llmw_host_rss_bytes")})', '{{run}}: rank {{rank}}')),
        curve('Free on host and disk', 'What is free where a rank runs and where the run '
              'writes.', 'bytes',
              (f'min by (run, host) ({of("llmw_host_free_bytes")})', '{{host}}: memory'),
              (f'min by (run, host) ({of("llmw_disk_free_bytes")})', '{{host}}: disk'))]


COLUMNS = {  # Heading -> metric of a rank, and its unit
    'Step': ('llmw_step', 'none'),
    'Step time': ('llmw_step_seconds', 's'),
    'Tokens/s': ('llmw_tokens_per_second', 'short'),
    'Resident memory': ('llmw_host_rss_bytes', 'bytes'),
    'Host free': ('llmw_host_free_bytes', 'bytes'),
    'Since last step': ('llmw_last_step_timestamp_seconds', 's')}


def rank_table():
    "Make the table of ranks: one line for each, from one question for each column."
    panel = common_parts(table.Panel(), 'Ranks', 'The newest figures of every rank. In a sharded '
                         'run all ranks have the same step.', 'none').height(8).span(24)
    names = {'run': 'Run', 'host': 'Host', 'rank': 'Rank'}
    for letter, (heading, (metric, unit)) in zip('ABCDEF', COLUMNS.items()):
        newest = f'max by (run, host, rank) ({of(metric)})'
        if heading == 'Since last step': newest = f'time() - {newest}'
        panel = panel.with_target(
            query(newest, '', letter).instant().format(PromQueryFormat.TABLE))
        panel = panel.override_by_name(heading, [DynamicConfigValue('unit', unit)])
        names[f'Value #{letter}'] = heading
    organised = {'excludeByName': {'Time': True}, 'renameByName': names}
    return panel.transformations([
        DataTransformerConfig(id_val='merge', options={}),
        DataTransformerConfig(id_val='organize', options=organised)])


def gpu_panels() -> list:
    "Make the curves of GPUs, under the names that DCGM gives to their facts."
    def by_gpu(metric): return of(metric), 'GPU {{gpu}} of {{hostname}}{{Hostname}}'
    return [
        curve('GPU utilisation', 'Share of the time in which a kernel ran; it says nothing '
              'about how well.', 'percent', by_gpu('DCGM_FI_DEV_GPU_UTIL'), span=6),
        curve('GPU memory', 'In use by all processes.', 'mbytes',
              by_gpu('DCGM_FI_DEV_FB_USED'), span=6),
        curve('GPU power', 'Drawn by each card.', 'watt',
              by_gpu('DCGM_FI_DEV_POWER_USAGE'), span=6),
        curve('GPU temperature', 'Of each card.', 'celsius',
              by_gpu('DCGM_FI_DEV_GPU_TEMP'), span=6)]


# The dashboard

ROWS = {
    'Run': run_panels, 'Learning': learning_panels, 'Speed': speed_panels,
    'Memory': memory_panels, 'Ranks': lambda: [rank_table()], 'GPUs': gpu_panels}


def build() -> Dashboard:
    "Make the dashboard; numbers of panels begin at 1 each time."
    global numbers
    numbers = count(1)
    board = (
        Dashboard('llm-workbook: a run').uid('llm-workbook-run')
        .description('A fine-tuning run, from the metrics that each of its ranks writes.')
        .tags(['llm-workbook']).editable().refresh('10s').time('now-30m', 'now')
        .timezone('browser').tooltip(DashboardCursorSync.CROSSHAIR).annotations([])
        .variables(variables()))
    for title, panels in ROWS.items():
        board = board.with_row(Row(title).id(next(numbers)))
        for panel in panels(): board = board.with_panel(panel)
    return board


def text() -> str:
    "Write the dashboard as JSON."
    plain = json.loads(JSONEncoder().encode(build().build()))
    return json.dumps(plain, indent=1, ensure_ascii=False) + '\n'


if __name__ == '__main__':
    FILE.write_text(text(), encoding='utf-8')
