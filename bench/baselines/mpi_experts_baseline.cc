// Measures a round of experts over Open MPI's all_to_all_v: one call for the row counts, one for
// the rows, one for the results. It leaves out gathering rows and summing results, which is in the
// baseline's favour.
//
//   mpi_experts_baseline TOKENS HIDDEN TOPK EXPERTS ELEMENT_BYTES ITERATIONS WARMUP
//   {"dispatch_us": 12.5, "combine_us": 80.1}
#include <mpi.h>

#include <cstdio>
#include <cstdlib>

#include "bench/baselines/baseline_job.h"
#include "bench/moe/moe_job.h"
#include "transport/base/quantile.h"

namespace baton::baselines {
namespace {

struct Blocks {
  std::vector<int> counts, offsets;
  int total = 0;
  explicit Blocks(const std::vector<int64_t>& of) {
    for (const int64_t count : of) {
      counts.push_back(static_cast<int>(count));
      offsets.push_back(total);
      total += static_cast<int>(count);
    }
  }
};

int run(bench::MoeJob job, int element, int iterations, int warmup) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &job.ranks);
  MPI_Datatype row;
  MPI_Type_contiguous(job.hidden * element, MPI_BYTE, &row);
  MPI_Type_commit(&row);
  const bench::MoeCounts mine = counts_of(job, rank);
  std::vector<int64_t> rows_from, pairs_from;
  for (int other = 0; other < job.ranks; ++other) {
    const bench::MoeCounts theirs = counts_of(job, other);
    rows_from.push_back(theirs.rows[static_cast<size_t>(rank)]);
    pairs_from.push_back(theirs.pairs[static_cast<size_t>(rank)]);
  }
  const Blocks rows_out(mine.rows), rows_in(rows_from), pairs_out(pairs_from), pairs_in(mine.pairs);
  const size_t bytes = static_cast<size_t>(job.hidden) * static_cast<size_t>(element);
  const auto most = [bytes](int a, int b) { return bytes * static_cast<size_t>(std::max(a, b)); };
  std::vector<char> out(most(rows_out.total, pairs_out.total), 1);
  std::vector<char> in(most(rows_in.total, pairs_in.total), 1);
  std::vector<int> counts(static_cast<size_t>(job.ranks));
  std::vector<double> dispatch, combine;
  for (int i = -warmup; i < iterations; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double began = now_us();
    MPI_Alltoall(rows_out.counts.data(), 1, MPI_INT, counts.data(), 1, MPI_INT, MPI_COMM_WORLD);
    MPI_Alltoallv(out.data(), rows_out.counts.data(), rows_out.offsets.data(), row, in.data(),
                  rows_in.counts.data(), rows_in.offsets.data(), row, MPI_COMM_WORLD);
    const double there = now_us();
    MPI_Alltoallv(out.data(), pairs_out.counts.data(), pairs_out.offsets.data(), row, in.data(),
                  pairs_in.counts.data(), pairs_in.offsets.data(), row, MPI_COMM_WORLD);
    if (i < 0) continue;
    dispatch.push_back(there - began);
    combine.push_back(now_us() - there);
  }
  double mean[2] = {base::median(dispatch), base::median(combine)}, sum[2];
  MPI_Reduce(mean, sum, 2, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    std::printf("{\"dispatch_us\": %.3f, \"combine_us\": %.3f}\n", sum[0] / job.ranks,
                sum[1] / job.ranks);
  }
  return 0;
}

}  // namespace
}  // namespace baton::baselines

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 2;
  if (argc == 8) {
    const auto number = [argv](int i) { return std::max(1, std::atoi(argv[i])); };
    status = baton::baselines::run(
        {.tokens = number(1), .hidden = number(2), .top_k = number(3), .experts = number(4)},
        number(5), number(6), number(7));
  } else {
    std::fprintf(stderr, "arguments: TOKENS HIDDEN TOPK EXPERTS ELEMENT_BYTES ITERATIONS WARMUP\n");
  }
  MPI_Finalize();
  return status;
}
