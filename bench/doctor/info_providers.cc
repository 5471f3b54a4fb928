// Probing providers as a worker would make them.
#include "bench/doctor/info.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "transport/address.h"
#include "transport/base/child.h"
#include "transport/base/limits/refusals.h"
#include "transport/base/unique_fd.h"
#include "transport/provider.h"

namespace baton::bench {
namespace {

// Providers that only programs have which were built with their libraries.
struct Optional {
  const char* name;
  const char* packages;
};
constexpr std::array kOptional = {Optional{"verbs", "libibverbs-dev"},
                                  Optional{"ucx", "libucx-dev"}};

Json report(const std::string& name, bool usable, int rank, const std::string& detail) {
  return {{"name", name}, {"usable", usable}, {"rank", rank}, {"detail", detail}};
}

Json probe(const std::string& name, const ProviderFactory& factory,
           const ProviderContext& context) {
  const std::unique_ptr<Provider> provider = factory(context);
  const Capabilities can = provider->capabilities();
  if (!can.available) return report(name, false, can.rank, can.detail);
  const auto where = provider->listen();
  if (!where.ok()) return report(name, false, can.rank, std::string(where.status().message()));
  const std::string_view why = why_on_request(name);
  return report(name, true, can.rank,
                why.empty() ? provider->capabilities().detail
                            : absl::StrCat(provider->capabilities().detail,
                                           "; used where it is asked for (--provider ", name,
                                           "): ", std::string(why)));
}

// Probes in a child process: a provider that workers use only on request (UCX) can abort its
// process, and a user who only asks for a list has not asked for that provider.
Json probe_apart(const std::string& name, const ProviderFactory& factory,
                 const ProviderContext& context) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return report(name, false, 0, base::refusal("pipe", errno));
  base::UniqueFd from(ends[0]), to(ends[1]);
  const pid_t child = base::fork_child();
  if (child < 0) return report(name, false, 0, base::refusal("fork", errno));
  if (child == 0) {
    const std::string text = probe(name, factory, context).dump();
    [[maybe_unused]] const ssize_t put = write(to.get(), text.data(), text.size());
    _exit(0);
  }
  to.reset();
  std::string text;
  std::array<char, 4096> some{};
  for (ssize_t got = 1; got > 0 || (got < 0 && errno == EINTR);) {
    got = read(from.get(), some.data(), some.size());
    if (got > 0) text.append(some.data(), static_cast<size_t>(got));
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  Json found = Json::parse(text, nullptr, false);
  if (!found.is_discarded()) return found;
  return report(
      name, false, 0,
      absl::StrCat("loading it ended the process that tried",
                   WIFSIGNALED(status) ? absl::StrCat(" (", strsignal(WTERMSIG(status)), ")") : "",
                   ": use another provider, or upgrade its library"));
}

}  // namespace

Json probe_providers() {
  std::vector<Json> found;
  const WorkerUid uid = WorkerUid::random();
  const auto key = ClusterKey::for_this_user();
  auto counters = CounterTable::create(uid);
  const absl::Status status = key.ok() ? counters.status() : key.status();
  RegionTable regions(uid);
  for (const auto& [name, factory] : registered_providers()) {
    if (!status.ok()) {
      found.push_back(report(name, false, 0, std::string(status.message())));
      continue;
    }
    HelloInfo self;
    self.uid = uid;
    self.name = "baton-info";
    const ProviderContext context{.clock = Clock::steady(),
                                  .key = *key,
                                  .self = self,
                                  .host_id = this_host_id(),
                                  .regions = regions,
                                  .counters = *counters,
                                  .listen_host = "",
                                  .listen_port = 0,
                                  .settings = {}};
    const auto& how = why_on_request(name).empty() ? probe : probe_apart;
    found.push_back(how(name, factory, context));
  }
  for (const Optional& optional : kOptional) {
    const bool there = std::any_of(found.begin(), found.end(),
                                   [&](const Json& p) { return p["name"] == optional.name; });
    if (there) continue;
    found.push_back(report(optional.name, false, 0,
                           absl::StrCat("not part of this program: `apt-get install ",
                                        optional.packages, "` and build again")));
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Json& a, const Json& b) { return a["rank"] > b["rank"]; });
  return found;
}

}  // namespace baton::bench
