#include "engine/serve/requests/forecast.cc"
