#!/bin/sh
# The last step of an environment: compiled Python, so that nothing is written at start; without
# what only compiling against it needs; the demo's model and adapters where they are easy to name.
set -eu
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
python -m pip uninstall --yes --quiet pip
rm -rf "$packages/torch/include" "$packages/torch/share/cmake" "$packages/torch/test"
find "$packages" -name '*.a' -delete
ln -s "$packages/loadout/demo/assets" /opt/loadout/demo
python -m compileall -qq "$packages" || true # some packages carry templates that are no Python
chmod -R a+rX /opt/loadout
