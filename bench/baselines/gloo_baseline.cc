// Gloo's collectives over TCP on loopback, timed as baton times its own. Takes the number of ranks
// before the job, and forks them; rank 0 reports. f32 only.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>

#include "bench/baselines/baseline_job.h"
#include "gloo/allgather.h"
#include "gloo/allreduce.h"
#include "gloo/allreduce_halving_doubling.h"
#include "gloo/alltoall.h"
#include "gloo/barrier.h"
#include "gloo/broadcast.h"
#include "gloo/math.h"
#include "gloo/reduce.h"
#include "gloo/reduce_scatter.h"
#include "gloo/rendezvous/context.h"
#include "gloo/rendezvous/file_store.h"
#include "gloo/transport/tcp/device.h"
#include "transport/base/child.h"

namespace baton::baselines {
namespace {

using Context = std::shared_ptr<gloo::rendezvous::Context>;
using Call = std::function<void()>;

void add(void* out, const void* a, const void* b, size_t count) {
  gloo::sum<float>(out, a, b, count);
}

// The call of `count` elements, or nothing where Gloo has none.
Call call_of(const Job& job, const Context& context, size_t count, std::vector<float>& in,
             std::vector<float>& out) {
  const size_t all = count * static_cast<size_t>(context->size);
  if (job.collective == "all_reduce" && job.algorithm == "halving_doubling") {
    const auto algorithm = std::make_shared<gloo::AllreduceHalvingDoubling<float>>(
        context, std::vector<float*>{out.data()}, static_cast<int>(count));
    return [algorithm] { algorithm->run(); };
  }
  if (job.collective == "reduce_scatter") {
    const std::vector<int> parts(static_cast<size_t>(context->size), static_cast<int>(count));
    const auto algorithm = std::make_shared<gloo::ReduceScatterHalvingDoubling<float>>(
        context, std::vector<float*>{out.data()}, static_cast<int>(all), parts);
    return [algorithm] { algorithm->run(); };
  }
  if (job.collective == "all_reduce") {
    const auto options = std::make_shared<gloo::AllreduceOptions>(context);
    options->setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    options->setInput(in.data(), count);
    options->setOutput(out.data(), count);
    options->setReduceFunction(add);
    return [options] { gloo::allreduce(*options); };
  }
  if (job.collective == "all_gather") {
    const auto options = std::make_shared<gloo::AllgatherOptions>(context);
    options->setInput(in.data(), count);
    options->setOutput(out.data(), all);
    return [options] { gloo::allgather(*options); };
  }
  if (job.collective == "broadcast") {
    const auto options = std::make_shared<gloo::BroadcastOptions>(context);
    options->setRoot(job.root);
    options->setOutput(out.data(), count);
    return [options] { gloo::broadcast(*options); };
  }
  if (job.collective == "reduce") {
    const auto options = std::make_shared<gloo::ReduceOptions>(context);
    options->setRoot(job.root);
    options->setInput(in.data(), count);
    options->setOutput(out.data(), count);
    options->setReduceFunction(add);
    return [options] { gloo::reduce(*options); };
  }
  if (job.collective == "all_to_all") {
    const auto options = std::make_shared<gloo::AlltoallOptions>(context);
    options->setInput(in.data(), all);
    options->setOutput(out.data(), all);
    return [options] { gloo::alltoall(*options); };
  }
  return nullptr;
}

// `times`: of all ranks, shared by them.
int run_rank(const Job& job, const std::string& folder, int rank, int ranks, double* times) {
  gloo::transport::tcp::attr attribute;
  attribute.hostname = "127.0.0.1";
  gloo::rendezvous::FileStore store(folder);
  const auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
  std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attribute);
  context->connectFullMesh(store, device);
  const auto meet = [&context] {
    gloo::BarrierOptions options(context);
    gloo::barrier(options);
  };
  const size_t largest = *std::max_element(job.counts.begin(), job.counts.end());
  const size_t width = static_cast<size_t>(job.iterations);
  std::vector<float> in(largest * static_cast<size_t>(ranks) + 1, 1), out = in;
  for (const size_t count : job.counts) {
    const Call call = count > 0 ? call_of(job, context, count, in, out) : nullptr;
    if (call == nullptr) continue;
    time_calls(job, call, meet, times + static_cast<size_t>(rank) * width);
    if (rank != 0) {
      meet();  // until rank 0 has read the times
      continue;
    }
    std::vector<double> mean(width, 0);
    for (size_t i = 0; i < width; ++i) {
      for (int r = 0; r < ranks; ++r) mean[i] += times[static_cast<size_t>(r) * width + i] / ranks;
    }
    report(count, mean);
    meet();
  }
  return 0;
}

// Forks the ranks; 0 if all did well.
int run(const Job& job, int ranks) {
  const size_t bytes =
      static_cast<size_t>(ranks) * static_cast<size_t>(job.iterations) * sizeof(double);
  void* const times =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  std::string folder = std::filesystem::temp_directory_path() / "baton-gloo-XXXXXX";
  if (times == MAP_FAILED || mkdtemp(folder.data()) == nullptr) return 1;
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = baton::base::fork_child();
    if (child == 0) {
      int status = 1;
      try {
        status = run_rank(job, folder, rank, ranks, static_cast<double*>(times));
      } catch (const std::exception& error) {
        std::fprintf(stderr, "gloo: rank %d: %s\n", rank, error.what());
      }
      std::fflush(nullptr);
      _exit(status);
    }
    if (child > 0) children.push_back(child);
  }
  int worst = static_cast<int>(children.size()) == ranks ? 0 : 1;
  for (const pid_t child : children) {
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) worst = 1;
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return worst;
}

}  // namespace
}  // namespace baton::baselines

int main(int argc, char** argv) {
  baton::baselines::Job job;
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 0;
  if (ranks < 1 || !baton::baselines::parse_job({argv + 2, argv + argc}, job)) return 2;
  if (job.type != "f32" || job.op != "sum") {
    std::fprintf(stderr, "this program runs Gloo's sums of f32 only\n");
    return 1;
  }
  return baton::baselines::run(job, ranks);
}
