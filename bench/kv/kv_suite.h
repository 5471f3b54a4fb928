// `baton kv_bw --suite`: every transport row of docs/benchmarks.md, with its target.
#pragma once

#include "bench/kv/kv_bw_options.h"

namespace baton::bench {

// Uses the options' json, seconds, pin and settings. Returns 0 when everything ran and was verified
// (a missed target is printed, not failed: the machine may be busy), else 1.
int run_kv_suite(const KvBwOptions& options);

}  // namespace baton::bench
