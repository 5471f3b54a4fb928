// The main function of the `baton` tool, and its table of commands.
#include <array>
#include <csignal>

#include "bench/cli/commands.h"
#include "bench/doctor/doctor.h"
#include "bench/doctor/info.h"
#include "bench/kv/kv_bw.h"
#include "bench/moe/moe_perf.h"
#include "bench/nccl_tests/collective_perf.h"
#include "bench/perftest/perf_options.h"
#include "engine/commands/serve_cli.h"
#include "engine/demo/demo.h"
#include "engine/train/train_run.h"

int main(int argc, char** argv) {
  using baton::bench::Command;
  std::signal(SIGXFSZ, SIG_IGN);  // a file that grows past `ulimit -f` is an error, and not the end
  static constexpr std::array kCommands = {
      Command{"demo", "the main job: prefill and decode in two processes, with a report",
              baton::engine::demo::demo_main},
      Command{"serve", "serve a model over HTTP: all in one, or --role prefill, decode, router",
              baton::engine::commands::serve_main},
      Command{"kv_store", "keep KV blocks in memory for several servers",
              baton::engine::commands::kv_store_main},
      Command{"generate", "continue a prompt", baton::engine::commands::generate_main},
      Command{"train", "train a small model on text", baton::engine::train::train_main},
      Command{"kv_bw", "paged transfers between two processes, against their floor",
              baton::bench::kv_bw_main},
      Command{"all_reduce_perf", "collectives, with the flags and columns of nccl-tests",
              baton::bench::collective_perf_main},
      Command{"all_gather_perf", "the same for all_gather; and reduce_scatter_perf",
              baton::bench::collective_perf_main},
      Command{"reduce_scatter_perf", "", baton::bench::collective_perf_main},
      Command{"broadcast_perf", "for broadcast; and reduce_perf for reduce",
              baton::bench::collective_perf_main},
      Command{"reduce_perf", "", baton::bench::collective_perf_main},
      Command{"alltoall_perf", "for all_to_all", baton::bench::collective_perf_main},
      Command{"sendrecv_perf", "for a ring of sends; and gather_, scatter_, hypercube_perf",
              baton::bench::collective_perf_main},
      Command{"gather_perf", "", baton::bench::collective_perf_main},
      Command{"scatter_perf", "", baton::bench::collective_perf_main},
      Command{"hypercube_perf", "", baton::bench::collective_perf_main},
      Command{"moe_perf", "dispatch and combine of experts, with the flags of DeepEP's tests",
              baton::bench::moe_perf_main},
      Command{"write_bw", "perftest's flags and columns; and read_bw, send_bw, *_lat",
              baton::bench::perf_main},
      Command{"read_bw", "", baton::bench::perf_main},
      Command{"send_bw", "", baton::bench::perf_main},
      Command{"write_lat", "", baton::bench::perf_main},
      Command{"read_lat", "", baton::bench::perf_main},
      Command{"send_lat", "", baton::bench::perf_main},
      Command{"info", "what this machine has: providers, RDMA devices, GPUs, limits",
              baton::bench::info_main},
      Command{"doctor", "what is wrong here, and the command that fixes it",
              baton::bench::doctor_main},
  };
  return baton::bench::run_command(kCommands, argc, argv);
}
