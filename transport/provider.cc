// The registry of providers, and their settings.
#include "transport/provider.h"

namespace baton {
namespace {
std::vector<std::pair<std::string, ProviderFactory>>& registry() {
  static std::vector<std::pair<std::string, ProviderFactory>> providers;
  return providers;
}
}  // namespace

ProviderRegistration::ProviderRegistration(const char* name, ProviderFactory factory) {
  registry().emplace_back(name, std::move(factory));
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
