// The perftest-shaped commands: `baton write_bw` and its five sisters.
#pragma once

namespace baton::bench {

// argv[0] is the name of the test. Exit status: 0, 1 when the test fails or is below a limit, 2 for
// bad arguments.
int perf_main(int argc, char** argv);

}  // namespace baton::bench
