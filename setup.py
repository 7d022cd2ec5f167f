"""Builds the package from settings.ini, with nothing but setuptools."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=['='])
parser.read(here/'settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']
package = cfg['lib_path']
folder = here/package
extras = {key.removesuffix('_requirements'): cfg[key].split()
          for key in cfg if key.endswith('_requirements')}
# The harness brings 29 packages, for one cell that no suite runs
for_dev = [needs for name, needs in extras.items() if name != 'lm-eval']
extras['dev'] = sorted({need for needs in for_dev for need in needs})
files = sorted(path for path in (folder/'assets').rglob('*') if path.is_file())
files += [folder/'py.typed', folder/'__init__.pyi']  # For type checkers and editors

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    keywords=cfg['keywords'],
    long_description=(here/'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    author=cfg['author'],
    url=cfg['git_url'],
    license='Apache-2.0',
    license_files=['LICENSE'],
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg['requirements'].split(),
    extras_require=extras,
    packages=find_packages(include=[package, f'{package}.*']),
    package_data={package: [str(file.relative_to(folder)) for file in files]},
    include_package_data=False,
    zip_safe=False,
    entry_points={
        'nbdev': [f'{package}={package}._modidx:d'],
        'console_scripts': [f'{cfg["lib_name"]}={package}.__main__:program'],
    },
    classifiers=[
        'Development Status :: 3 - Alpha',
        'Intended Audience :: Developers',
        'Natural Language :: English',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3',
    ],
)
