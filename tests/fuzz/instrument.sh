#!/bin/sh
# The rustc of a fuzz build: gives the workspace's own crates the counters that libFuzzer steers by, and leaves their
# build scripts as they are. Only stable flags. Crates of others are shared with the build of the tests.
case " $* " in
*" --crate-name build_script_"*) exec "$@" ;;
esac
exec "$@" -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares
