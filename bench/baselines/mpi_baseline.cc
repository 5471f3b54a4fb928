// Open MPI's collectives, timed as baton times its own. mpirun starts it; rank 0 reports one JSON
// line per size. It is a program of its own, so that Baton does not depend on that library.
//
//   mpi_baseline COLLECTIVE TYPE OP ROOT ITERATIONS WARMUP COUNT...
//   {"count": 256, "us": {"mean": 1.2, "min": 1.1, "p50": 1.2, "max": 1.9}}
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <string>
#include <vector>

namespace baton::baselines {
namespace {

struct Job {
  std::string collective;  // "all_reduce"
  std::string type;        // "f32"
  std::string op;          // "sum"
  int root = 0;
  int iterations = 20;
  int warmup = 1;
  std::vector<size_t> counts;  // the call's argument, as in baton's table
};

// False, and a word on stderr, if the arguments are not a job.
bool parse_job(const std::vector<std::string>& arguments, Job& job) {
  if (arguments.size() < 7) {
    std::fprintf(stderr, "arguments: COLLECTIVE TYPE OP ROOT ITERATIONS WARMUP COUNT...\n");
    return false;
  }
  job.collective = arguments[0];
  job.type = arguments[1];
  job.op = arguments[2];
  job.root = std::atoi(arguments[3].c_str());
  job.iterations = std::max(1, std::atoi(arguments[4].c_str()));
  job.warmup = std::max(0, std::atoi(arguments[5].c_str()));
  for (size_t i = 6; i < arguments.size(); ++i) {
    job.counts.push_back(std::strtoull(arguments[i].c_str(), nullptr, 10));
  }
  return true;
}

double now_us() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(now).count();
}

// Times `call` as baton's own benchmark does: warm up, meet, then one clock reading per call.
template <class Call>
void time_calls(const Job& job, const Call& call, double* us) {
  for (int i = 0; i < job.warmup; ++i) call();
  MPI_Barrier(MPI_COMM_WORLD);
  double from = now_us();
  for (int i = 0; i < job.iterations; ++i) {
    call();
    const double to = now_us();
    us[i] = to - from;
    from = to;
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

// `us`: of each iteration, the mean over the ranks.
void report(size_t count, std::vector<double> us) {
  std::sort(us.begin(), us.end());
  const double mean = std::accumulate(us.begin(), us.end(), 0.0) / static_cast<double>(us.size());
  std::printf(
      "{\"count\": %zu, \"us\": {\"mean\": %.3f, \"min\": %.3f, \"p50\": %.3f, \"max\": %.3f}}\n",
      count, mean, us.front(), us[us.size() / 2], us.back());
  std::fflush(stdout);
}

struct Group {
  int rank = 0;
  int ranks = 1;
  MPI_Datatype type = MPI_FLOAT;
  MPI_Op op = MPI_SUM;
};

int run(const Job& job) {
  Group group;
  MPI_Comm_rank(MPI_COMM_WORLD, &group.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &group.ranks);
  const std::map<std::string, MPI_Datatype> types = {
      {"f32", MPI_FLOAT},    {"f64", MPI_DOUBLE},   {"i8", MPI_INT8_T},
      {"u8", MPI_UINT8_T},   {"i32", MPI_INT32_T},  {"i64", MPI_INT64_T},
      {"u32", MPI_UINT32_T}, {"u64", MPI_UINT64_T}, {"bool", MPI_C_BOOL}};
  const bool logical = job.type == "bool";
  const std::map<std::string, MPI_Op> ops = {{"sum", MPI_SUM},
                                             {"prod", MPI_PROD},
                                             {"min", MPI_MIN},
                                             {"max", MPI_MAX},
                                             {"and", logical ? MPI_LAND : MPI_BAND},
                                             {"or", logical ? MPI_LOR : MPI_BOR},
                                             {"xor", logical ? MPI_LXOR : MPI_BXOR}};
  const auto type = types.find(job.type);
  const auto op = ops.find(job.op);
  if (type == types.end() || op == ops.end()) {
    if (group.rank == 0)
      std::fprintf(stderr, "MPI has no %s of %s\n", job.op.c_str(), job.type.c_str());
    return 1;
  }
  group.type = type->second;
  group.op = op->second;
  int element = 0;
  MPI_Type_size(group.type, &element);

  const size_t largest = *std::max_element(job.counts.begin(), job.counts.end());
  const size_t bytes = (largest * static_cast<size_t>(element * group.ranks)) + 64;
  std::vector<char> in(bytes, 1), out(bytes, 0);
  std::vector<double> mine(static_cast<size_t>(job.iterations)), sum(mine.size());
  for (const size_t elements : job.counts) {
    const int count = static_cast<int>(elements);
    const auto call = [&] {
      if (job.collective == "all_reduce") {
        MPI_Allreduce(in.data(), out.data(), count, group.type, group.op, MPI_COMM_WORLD);
      } else if (job.collective == "reduce_scatter") {
        MPI_Reduce_scatter_block(in.data(), out.data(), count, group.type, group.op,
                                 MPI_COMM_WORLD);
      } else if (job.collective == "all_gather") {
        MPI_Allgather(in.data(), count, group.type, out.data(), count, group.type, MPI_COMM_WORLD);
      } else if (job.collective == "broadcast") {
        MPI_Bcast(in.data(), count, group.type, job.root, MPI_COMM_WORLD);
      } else if (job.collective == "reduce") {
        MPI_Reduce(in.data(), out.data(), count, group.type, group.op, job.root, MPI_COMM_WORLD);
      } else if (job.collective == "gather") {
        MPI_Gather(in.data(), count, group.type, out.data(), count, group.type, job.root,
                   MPI_COMM_WORLD);
      } else if (job.collective == "scatter") {
        MPI_Scatter(in.data(), count, group.type, out.data(), count, group.type, job.root,
                    MPI_COMM_WORLD);
      } else if (job.collective == "all_to_all") {
        MPI_Alltoall(in.data(), count, group.type, out.data(), count, group.type, MPI_COMM_WORLD);
      } else {
        const int after = (group.rank + 1) % group.ranks;
        const int before = (group.rank + group.ranks - 1) % group.ranks;
        MPI_Sendrecv(in.data(), count, group.type, after, 0, out.data(), count, group.type, before,
                     0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      }
    };
    time_calls(job, call, mine.data());
    MPI_Reduce(mine.data(), sum.data(), job.iterations, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    for (double& us : sum) us /= group.ranks;
    if (group.rank == 0) report(elements, sum);
  }
  return 0;
}

}  // namespace
}  // namespace baton::baselines

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  baton::baselines::Job job;
  const bool good = baton::baselines::parse_job({argv + 1, argv + argc}, job);
  const int status = good ? baton::baselines::run(job) : 2;
  MPI_Finalize();
  return status;
}
