// `baton executor_bench`: what the executor itself costs per step of a schedule, with links that do
// nothing.
#pragma once

namespace baton::bench {

int executor_bench_main(int argc, char** argv);

}  // namespace baton::bench
