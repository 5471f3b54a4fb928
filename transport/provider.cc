// The registry of providers, and their settings.
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

std::string_view setting(const ProviderContext& context, std::string_view key,
                         std::string_view fallback) {
  for (const auto& [name, value] : context.settings) {
    if (name == key) return value;
  }
  return fallback;
}

}  // namespace baton
