// The registry of providers.
#include "transport/provider.h"

#include <algorithm>

namespace baton {
namespace {
std::vector<std::pair<std::string, ProviderFactory>>& registry() {
  static std::vector<std::pair<std::string, ProviderFactory>> providers;
  return providers;
}
}  // namespace

ProviderRegistration::ProviderRegistration(const char* name, ProviderFactory factory) {
  // In the order of their names, whatever the linker's is.
  auto& all = registry();
  const auto at =
      std::find_if(all.begin(), all.end(), [&](const auto& other) { return other.first > name; });
  all.emplace(at, name, std::move(factory));
}

const std::vector<std::pair<std::string, ProviderFactory>>& registered_providers() {
  return registry();
}

}  // namespace baton
