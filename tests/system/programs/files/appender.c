/* appender FILE LINE: appends the line to the file. The program is linked statically, so that no
 * library is loaded into it. */
#include <stdio.h>

int main(int argc, char **argv)
{
    FILE *file = argc == 3 ? fopen(argv[1], "a") : NULL;
    return !file || fprintf(file, "%s\n", argv[2]) < 0 || fclose(file);
}
