// What nearly every test uses, in one line: GoogleTest, statuses, strings, the standard library.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "tests/must.h"
#include "tests/std.h"
