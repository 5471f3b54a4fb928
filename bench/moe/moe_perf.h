// `baton moe_perf`: dispatch and combine of experts among forked ranks, with DeepEP's flags and
// columns.
#pragma once

namespace baton::bench {

int moe_perf_main(int argc, char** argv);

}  // namespace baton::bench
