#!/bin/sh
# Installs Debian's Chromium and its driver for the tests that open the report page. Without them
# these tests are skipped.
command -v chromium >/dev/null && command -v chromedriver >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing chromium and chromium-driver for the tests of the report page"
    timeout 120 apt-get update -qq >/dev/null 2>&1
    DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y -qq --no-install-recommends \
        chromium chromium-driver >/dev/null 2>&1 && exit 0
fi
echo "There is no chromium with chromedriver here: tests in a browser will be skipped"
