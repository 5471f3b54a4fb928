// `baton info --settings`: every setting and environment variable of this program.
#pragma once

#include <string>

#include "bench/report/report.h"

namespace baton::bench {

// {"settings": [{"name","unit","default","range","meaning"}], "environment": [{"name","default",
// "meaning"}]}, by name. The settings are those of the providers that are linked.
Json settings_info();

std::string settings_text(const Json& info);

// docs/settings.md as it should be: its test compares, `baton info --settings --markdown` makes it.
std::string settings_markdown(const Json& info);

}  // namespace baton::bench
