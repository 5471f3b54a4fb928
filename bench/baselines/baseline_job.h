// The command line of a baseline program and its report: one JSON line per size. Baselines are
// separate programs, so that Baton does not depend on their libraries.
//
//   BASELINE COLLECTIVE ALGORITHM TYPE OP ROOT ITERATIONS WARMUP COUNT...
//   {"count": 256, "us": {"mean": 1.2, "min": 1.1, "p50": 1.2, "max": 1.9}}
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

namespace baton::baselines {

struct Job {
  std::string collective;  // "all_reduce"
  std::string algorithm;   // where the baseline has several; else "default"
  std::string type;        // "f32"
  std::string op;          // "sum"
  int root = 0;
  int iterations = 20;
  int warmup = 1;
  std::vector<size_t> counts;  // the call's argument, as in baton's table
};

// False, and a word on stderr, if the arguments are not a job.
inline bool parse_job(const std::vector<std::string>& arguments, Job& job) {
  if (arguments.size() < 8) {
    std::fprintf(stderr,
                 "arguments: COLLECTIVE ALGORITHM TYPE OP ROOT ITERATIONS WARMUP COUNT...\n");
    return false;
  }
  job.collective = arguments[0];
  job.algorithm = arguments[1];
  job.type = arguments[2];
  job.op = arguments[3];
  job.root = std::atoi(arguments[4].c_str());
  job.iterations = std::max(1, std::atoi(arguments[5].c_str()));
  job.warmup = std::max(0, std::atoi(arguments[6].c_str()));
  for (size_t i = 7; i < arguments.size(); ++i) {
    job.counts.push_back(std::strtoull(arguments[i].c_str(), nullptr, 10));
  }
  return true;
}

inline double now_us() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(now).count();
}

// Times `call` as baton's own benchmark does: warm up, meet, then one clock reading per call.
template <class Call, class Meet>
void time_calls(const Job& job, const Call& call, const Meet& meet, double* us) {
  for (int i = 0; i < job.warmup; ++i) call();
  meet();
  double from = now_us();
  for (int i = 0; i < job.iterations; ++i) {
    call();
    const double to = now_us();
    us[i] = to - from;
    from = to;
  }
  meet();
}

// `us`: of each iteration, the mean over the ranks.
inline void report(size_t count, std::vector<double> us) {
  std::sort(us.begin(), us.end());
  const double mean = std::accumulate(us.begin(), us.end(), 0.0) / static_cast<double>(us.size());
  std::printf(
      "{\"count\": %zu, \"us\": {\"mean\": %.3f, \"min\": %.3f, \"p50\": %.3f, \"max\": %.3f}}\n",
      count, mean, us.front(), us[us.size() / 2], us.back());
  std::fflush(stdout);
}

}  // namespace baton::baselines
