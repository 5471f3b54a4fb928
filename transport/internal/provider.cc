// The registry of providers.
#include "transport/provider.h"

#include <algorithm>
#include <functional>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "transport/base/nearest_name.h"
#include "transport/internal/device_memory.h"

namespace baton {
namespace {
std::vector<std::pair<std::string, ProviderFactory>>& registry() {
  static std::vector<std::pair<std::string, ProviderFactory>> providers;
  return providers;
}
// Providers that workers use only on request.
std::map<std::string, std::string, std::less<>>& on_request() {
  static std::map<std::string, std::string, std::less<>> reasons;
  return reasons;
}
}  // namespace

absl::Status Rail::moves(const RegionEntry& region) const {
  return internal::touched_by_cpu(properties().provider, region);
}

absl::Status Rail::maps(const RegionEntry& /*local*/, const RemoteRegion& /*remote*/) const {
  return absl::UnimplementedError(properties().provider + " maps no memory of devices");
}

absl::Status Provider::takes(const RegionEntry& region) const {
  return internal::touched_by_cpu(capabilities().name, region);
}

ProviderRegistration::ProviderRegistration(const char* name, ProviderFactory factory,
                                           absl::Span<const Setting> settings,
                                           const char* why_on_request) {
  // In the order of their names, whatever the linker's is.
  auto& all = registry();
  const auto at =
      std::find_if(all.begin(), all.end(), [&](const auto& other) { return other.first > name; });
  all.emplace(at, name, std::move(factory));
  declare_settings(settings);
  if (*why_on_request != 0) on_request().emplace(name, why_on_request);
}

const std::vector<std::pair<std::string, ProviderFactory>>& registered_providers() {
  return registry();
}

std::string_view why_on_request(std::string_view provider) {
  const auto found = on_request().find(provider);
  return found == on_request().end() ? std::string_view() : found->second;
}

absl::Status check_provider(std::string_view name) {
  std::vector<std::string> known;
  for (const auto& [provider, factory] : registry()) {
    if (provider == name) return absl::OkStatus();
    known.push_back(provider);
  }
  const std::string all =
      known.empty() ? "none (link baton_providers)" : absl::StrJoin(known, ", ");
  const std::string near = base::did_you_mean(name, known);
  return absl::InvalidArgumentError(absl::StrCat(
      "there is no provider \"", std::string(name), "\" in this program",
      near.empty() ? absl::StrCat(": it has ", all) : absl::StrCat(near, " (it has ", all, ")")));
}

}  // namespace baton
