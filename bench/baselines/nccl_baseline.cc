// NCCL's collectives on memory of GPUs, timed as baton times its own. Takes the number of ranks
// before the job, and has a GPU for each; one process drives them. Where that cannot be it prints
// the reason, {"missing": "..."}, and ends well.
#include <cstdio>
#include <string>

#include "bench/baselines/nccl_times.h"

namespace baton::baselines {
namespace {

int missing(const absl::Status& why) {
  std::string text(why.message());
  for (char& letter : text) {
    if (letter == '"' || letter == '\\' || static_cast<unsigned char>(letter) < ' ') letter = ' ';
  }
  std::printf("{\"missing\": \"%s\"}\n", text.c_str());
  return 0;
}

int run(int argc, char** argv) {
  Job job;
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 0;
  if (ranks < 1 || !parse_job({argv + 2, argv + argc}, job)) return 2;
  const auto group = NcclGroup::create(ranks);
  if (!group.ok()) return missing(group.status());
  for (const size_t count : job.counts) {
    const auto us = (*group)->times(job, count);
    if (!us.ok()) return missing(us.status());
    report(count, *us);
  }
  return 0;
}

}  // namespace
}  // namespace baton::baselines

int main(int argc, char** argv) { return baton::baselines::run(argc, argv); }
