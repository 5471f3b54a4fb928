// Probing providers as a worker would make them.
#include "bench/doctor/info_providers.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "transport/address.h"
#include "transport/provider.h"

namespace baton::bench {
namespace {

// Of Baton, but only in programs that were built with their libraries.
struct Optional {
  const char* name;
  const char* packages;
};
constexpr std::array kOptional = {Optional{"verbs", "libibverbs-dev librdmacm-dev"},
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
    found.push_back(probe(name, factory, context));
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
