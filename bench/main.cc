// The `baton` command.
#include <array>

#include "bench/commands.h"
#include "bench/kv_bw.h"
#include "engine/model/kernel_bench.h"
#include "engine/serve/demo.h"
#include "engine/serve/serve_cli.h"
#include "engine/train/train_cli.h"

int main(int argc, char** argv) {
  using baton::bench::Command;
  static constexpr std::array kCommands = {
      Command{"demo", "the main job: prefill and decode in two processes, with a report",
              baton::demo_main},
      Command{"serve", "serve a model over HTTP: all in one, or --role prefill, decode, router",
              baton::serve_main},
      Command{"serve_bench", "load a server and report TTFT, TPOT and ITL",
              baton::serve_bench_main},
      Command{"generate", "continue a prompt", baton::generate_main},
      Command{"train", "train a small model on text", baton::train_main},
      Command{"kv_bw", "paged transfers between two processes, against their floor",
              baton::bench::kv_bw_main},
      Command{"kernel_bench", "the CPU kernels against the peaks of this machine",
              baton::kernel_bench_main},
  };
  return baton::bench::run_command(kCommands, argc, argv);
}
